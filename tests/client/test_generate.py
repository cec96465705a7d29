"""`slipstream generate` and the HTTP client: what is printed, what is sent, and how it ends."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from fake_triton import Fail, FakeTriton, Say, Wait, answer, interrupt_when
from slipstream_client import cli
from slipstream_client.http_client import HttpSlipstreamClient, parse_events
from slipstream_client.tensors import RequestFailed


def event(text: str, tokens: int = 1, reason: str = "", **more: Any) -> bytes:
    """One server-sent event as Triton writes it."""
    fields = {"text_output": text, "num_output_tokens": tokens, "num_input_tokens": 7, "finish_reason": reason}
    return f"data: {json.dumps(fields | more)}\n\n".encode()


class FakeHttp:
    """Triton's HTTP front: answers `generate` and `generate_stream` with what a test lays out."""

    CONTINUOUS = ("text_input", "sampling_parameters", "stream", "cancel", "return_stats", "return_finish_reason")

    def __init__(self) -> None:
        self.status = 200
        self.parts: list[bytes | Callable[[], None]] = []
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                decoupled = "unary" not in self.path and "dynamic" not in self.path
                config = {
                    "name": self.path.split("/")[3],
                    "max_batch_size": 0 if "continuous" in self.path else 16,
                    "input": [{"name": name} for name in fake.CONTINUOUS if "continuous" in self.path],
                    "model_transaction_policy": {"decoupled": decoupled},
                    "parameters": {"name": {"string_value": "continuous"}},
                }
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(config).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.bodies.append(body)
                fake.paths.append(self.path)
                self.send_response(fake.status)
                self.end_headers()
                for part in [] if body.get("cancel") else fake.parts:
                    if callable(part):
                        part()
                    else:
                        self.wfile.write(part)
                        self.wfile.flush()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"127.0.0.1:{self.server.server_port}"


@pytest.fixture
def http() -> Iterator[FakeHttp]:
    fake = FakeHttp()
    threading.Thread(target=fake.server.serve_forever, daemon=True).start()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.make_app([]), ["generate", *arguments])


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """Exit code, as the console command gives it."""
    monkeypatch.setattr("sys.argv", ["slipstream", "generate", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code


def test_it_streams_over_grpc_and_is_greedy_by_default(triton: FakeTriton) -> None:
    triton.script = lambda received: answer([4, 5, 6])
    result = run("hello", "--url", triton.url, "--max-tokens", "3")
    assert (result.exit_code, result.stdout) == (0, " 4 5 6\n")
    assert triton.received[0].sampling == [{"max_tokens": 3, "temperature": 0.0}]
    assert "stream" in triton.received[0].inputs


def test_an_empty_answer_is_explained(triton: FakeTriton) -> None:
    triton.script = lambda received: [Say([2], text="", final=True)]
    result = run("hello", "--url", triton.url)
    assert (result.exit_code, result.stdout) == (0, "\n")
    assert result.stderr == (
        "(empty: the model's first token ended the answer; --ignore-eos goes on, or give it a text to continue)\n"
    )


def test_every_option_reaches_the_server(triton: FakeTriton) -> None:
    triton.script = lambda received: answer([4])
    sampling = ["--temperature", "0.7", "--top-k", "5", "--top-p", "0.9", "--seed", "11", "--ignore-eos"]
    assert run("hello", "--url", triton.url, *sampling, "--no-stream", "--batcher", "dynamic").exit_code == 0
    (received,) = triton.received
    assert received.model == "dynamic"
    assert received.sampling == [{"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 11, "ignore_eos": True}]


@pytest.mark.parametrize("whole", [[], ["--no-stream"]])
def test_json_is_one_object_with_the_counts(triton: FakeTriton, whole: list[str]) -> None:
    triton.script = lambda received: (
        answer([4, 5], queue_ms=2.0) if not whole else [Say([4, 5], final=True, stats={"queue_ms": 2.0})]
    )
    result = run("hello", "--url", triton.url, "--json", "--stats", *whole)
    printed = json.loads(result.stdout)
    assert printed["stats"]["queue_ms"] == 2.0
    del printed["stats"]
    assert printed == {"text": " 4 5", "finish_reason": "stop", "num_input_tokens": 7, "num_output_tokens": 2}


def test_a_failure_is_one_line_and_exits_with_1(
    triton: FakeTriton, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    triton.script = lambda received: [Say([1]), Fail("engine is down\nTraceback (most recent call last):")]
    assert run_main(monkeypatch, "hello", "--url", triton.url) == 1
    output = capsys.readouterr()
    assert output.out == " 1\n"
    assert output.err == "slipstream: engine is down (INTERNAL)\n"


@pytest.mark.parametrize("arguments", [["--batcher", "continuous"], ["--batcher", "iterative"], ["--no-stream"]])
def test_ctrl_c_cancels_at_the_server_and_exits_with_130(triton: FakeTriton, arguments: list[str]) -> None:
    begun = threading.Event()

    def script(received: Any) -> list[Say | Fail | Wait]:
        begun.set()
        return [Say([1]), Wait(30.0), Say([2], final=True)]

    triton.script = script
    with interrupt_when(begun):
        assert run("hello", "--url", triton.url, *arguments).exit_code == 130
    assert triton.cancel_seen.wait(5)


def test_http_streams_events(http: FakeHttp) -> None:
    http.parts = [event("a", 0), event("b", 2), event("ü", 1, "stop", stats='{"queue_ms": 1.5}')]
    result = run("hello", "--http", "--url", http.url, "--max-tokens", "3")
    assert (result.exit_code, result.stdout) == (0, "abü\n")
    assert http.paths == ["/v2/models/continuous/generate_stream"]
    (body,) = http.bodies
    assert json.loads(body["sampling_parameters"]) == {"max_tokens": 3, "temperature": 0.0}
    assert (body["text_input"], body["stream"], body["return_stats"]) == ("hello", True, True)
    chunks = list(HttpSlipstreamClient(http.url).stream("hello"))
    assert [chunk.num_tokens for chunk in chunks] == [0, 2, 1]
    assert (chunks[-1].final, chunks[-1].stats) == (True, {"queue_ms": 1.5})


def test_http_without_a_stream_asks_generate_once(http: FakeHttp) -> None:
    http.parts = [event("whole", 3, "length").removeprefix(b"data: ")]
    generation = HttpSlipstreamClient(f"http://{http.url}/").generate("hello")
    assert (generation.text, generation.num_output_tokens, generation.finish_reason) == ("whole", 3, "length")
    assert http.paths == ["/v2/models/continuous/generate"]
    assert "stream" not in http.bodies[0]


def test_an_error_event_half_way_is_a_failure(http: FakeHttp) -> None:
    http.parts = [event("a"), b'data: {"error":"engine died"}\n\n']
    chunks = HttpSlipstreamClient(http.url).stream("hello")
    assert next(chunks).text == "a"
    with pytest.raises(RequestFailed, match="engine died"):
        next(chunks)


def test_an_http_stream_that_stops_short_is_a_failure(http: FakeHttp) -> None:
    http.parts = [event("a")]
    with pytest.raises(RequestFailed, match="before the last response"):
        list(HttpSlipstreamClient(http.url).stream("hello"))


@pytest.mark.parametrize("body", [b'{"error":"max_tokens is 0"}', b'data: {"error":"max_tokens is 0"}\n\n'])
def test_an_http_status_carries_its_code_and_text(http: FakeHttp, body: bytes) -> None:
    http.status, http.parts = 400, [body]
    with pytest.raises(RequestFailed) as caught:
        list(HttpSlipstreamClient(http.url).stream("hello"))
    assert (caught.value.code, caught.value.text) == ("INVALID_ARGUMENT", "max_tokens is 0")


def test_leaving_an_http_stream_closes_its_connection(http: FakeHttp) -> None:
    left = threading.Event()
    go_on = threading.Event()

    def write_on() -> None:
        go_on.wait(5)

    http.parts = [event("a"), write_on, *[event("b" * 1000)] * 2000, left.set]
    chunks = HttpSlipstreamClient(http.url).stream("hello")
    next(chunks)
    chunks.close()
    go_on.set()
    # The server's writing fails before it comes to the end.
    assert not left.wait(1.0)


def test_interrupting_a_whole_answer_over_http_cancels_it_by_id(http: FakeHttp) -> None:
    begun, released = threading.Event(), threading.Event()

    def stall() -> None:
        begun.set()
        released.wait(10)

    http.parts = [stall]
    with interrupt_when(begun):
        assert run("hello", "--http", "--no-stream", "--url", http.url).exit_code == 130
    released.set()
    request, cancel = http.bodies
    assert cancel == {"id": request["id"], "cancel": True}


@pytest.mark.parametrize(
    ("body", "objects"),
    [
        (b'data: {"a": 1}\n\ndata: {"a": 2}\n\n', [{"a": 1}, {"a": 2}]),
        (b'data:{"a": 1}\r\n\r\n', [{"a": 1}]),
        (b': comment\n\ndata: {"a":\ndata: 1}\n\n', [{"a": 1}]),
        (b'event: x\ndata: {"a": 1}', [{"a": 1}]),
        (b"", []),
    ],
)
def test_server_sent_events_are_parsed_as_the_standard_says(body: bytes, objects: list[dict]) -> None:
    assert list(parse_events(body.splitlines(keepends=True))) == objects
