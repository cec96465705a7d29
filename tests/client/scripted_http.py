"""An HTTP server scripted in time: Triton's `generate_stream` and `infer`, and OpenAI's completions, by script.

It notes what it did by `time.perf_counter()`, the clock of the generator's records.
"""

from __future__ import annotations

import json
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Event:
    """Server-sent events, in one write; a text is sent as it is."""

    data: list[dict[str, Any] | str]

    def __init__(self, *data: dict[str, Any] | str) -> None:
        self.data = list(data)

    def encoded(self) -> bytes:
        texts = [each if isinstance(each, str) else json.dumps(each) for each in self.data]
        return "".join(f"data: {text}\n\n" for text in texts).encode()


@dataclass
class Raw:
    """Bytes of the body as they are."""

    content: bytes

    def encoded(self) -> bytes:
        return self.content


@dataclass
class Pause:
    """Nothing for a while."""

    seconds: float


@dataclass
class Answer:
    """The whole response: no stream."""

    body: dict[str, Any]
    status: int = 200


@dataclass
class Cut:
    """The connection closes in the middle of the body."""


@dataclass
class Silence:
    """The connection stays open and nothing comes, until the client leaves."""


Step = Event | Raw | Pause | Answer | Cut | Silence


@dataclass
class Served:
    """One request as it arrived, and what was done about it."""

    path: str
    body: dict[str, Any]
    attempt: int  # how often the same text came before
    connection: int
    arrived: float
    said: list[float] = field(default_factory=list)  # just before each write
    overslept: float = 0.0  # by so much its pauses were longer than scripted

    @property
    def text(self) -> str:
        if "inputs" in self.body:
            return str({tensor["name"]: tensor["data"][0] for tensor in self.body["inputs"]}["text_input"])
        return str(self.body.get("text_input") or self.body["prompt"])

    @property
    def sampling(self) -> dict[str, Any]:
        return dict(json.loads(self.body["sampling_parameters"]))


Script = Callable[[Served], list[Step]]


class ScriptedHttp(ThreadingHTTPServer):
    """Follows `script` in every POST; `models` are the configurations that it gives."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"127.0.0.1:{self.server_address[1]}"
        self.script: Script = lambda served: []
        self.models: dict[str, dict[str, Any]] = {}
        self.served: list[Served] = []
        self.client_left = threading.Event()
        self.lock = threading.Lock()

    def __enter__(self) -> ScriptedHttp:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    @property
    def overslept_s(self) -> float:
        """By how much it missed its script at most, in one request."""
        return max((served.overslept for served in self.served), default=0.0)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who leaves early is part of a test."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: ScriptedHttp

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._answer(Answer({"data": []}))
        elif (name := self.path.split("/")[3]) in self.server.models:
            self._answer(Answer(self.server.models[name]))
        else:
            self._answer(Answer({"error": f"Request for unknown model: '{name}' is not found"}, 400))

    def do_POST(self) -> None:
        try:
            self._follow_script(self._served())
        except OSError:
            self.close_connection = True
            self.server.client_left.set()

    def _follow_script(self, served: Served) -> None:
        streaming = False
        for step in self.server.script(served):
            if isinstance(step, Pause):
                due = time.perf_counter() + step.seconds
                time.sleep(step.seconds)
                served.overslept += time.perf_counter() - due
            elif isinstance(step, Answer):
                served.said.append(time.perf_counter())
                return self._answer(step)
            elif isinstance(step, Cut):
                self.close_connection = True
                return None
            elif isinstance(step, Silence):
                return self._wait_until_left()
            else:
                if not streaming:
                    self._start_stream()
                    streaming = True
                content = step.encoded()
                served.said.append(time.perf_counter())
                self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))
        if not streaming:
            self._start_stream()
        self.wfile.write(b"0\r\n\r\n")
        return None

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _served(self) -> Served:
        now = time.perf_counter()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        served = Served(self.path, body, 0, self.client_address[1], now)
        with self.server.lock:
            served.attempt = sum(other.text == served.text for other in self.server.served)
            self.server.served.append(served)
        return served

    def _start_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _answer(self, answer: Answer) -> None:
        content = json.dumps(answer.body).encode()
        self.send_response(answer.status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _wait_until_left(self) -> None:
        self.close_connection = True
        if select.select([self.connection], [], [], 30)[0] and not self.connection.recv(1):
            self.server.client_left.set()
