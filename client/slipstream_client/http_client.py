"""Generate text from a Slipstream model over Triton's HTTP endpoints `generate` and `generate_stream`."""

from __future__ import annotations

import contextlib
import http.client
import json
import uuid
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from slipstream_client.tensors import (
    Chunk,
    Generation,
    ModelContract,
    RequestFailed,
    SamplingOptions,
    parse_json_rows,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

_CANCEL_TIMEOUT_S = 5.0
CODE_OF_STATUS = {400: "INVALID_ARGUMENT", 404: "NOT_FOUND", 499: "CANCELLED", 500: "INTERNAL", 501: "UNIMPLEMENTED"}
CODE_OF_STATUS |= {429: "UNAVAILABLE", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED"}


class HttpSlipstreamClient:
    """One model of one server; every request has a connection of its own, and closing that cancels a stream.

    Triton notices a client that left only when it next writes to it: at the next chunk of a stream, and for a whole
    answer too late. So that is cancelled by a second request with its id, where the model takes one. `timeout_s` bounds
    the wait for each piece of an answer.
    """

    def __init__(
        self, url: str = "127.0.0.1:8000", model: str = "continuous", *, timeout_s: float | None = None
    ) -> None:
        self.url = url.removeprefix("http://").rstrip("/")
        self.model = model
        self._timeout_s = timeout_s
        self._contract: ModelContract | None = None

    @property
    def contract(self) -> ModelContract:
        """The model's contract, asked of the server once."""
        if self._contract is None:
            connection = self._connect()
            try:
                answer = self._exchange(connection, "GET", "config")
                self._contract = ModelContract.of_json(json.loads(answer.read()))
            except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
                raise RequestFailed(f"what answers at {self.url} is no Triton over HTTP", "UNAVAILABLE") from error
            finally:
                connection.close()
        return self._contract

    def generate(
        self,
        prompt: str | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Generation:
        """Return the whole answer to a prompt or to token ids.

        Raises:
            RequestFailed: the server refused the request or ended it early.
        """
        if self.contract.decoupled and "stream" not in self.contract.inputs:
            return Generation.of_chunks(self.stream(prompt, input_ids=input_ids, **sampling))
        request_id = uuid.uuid4().hex
        body = self.contract.json_body(prompt, input_ids, sampling, stream=False) | {"id": request_id}
        connection = self._connect()
        try:
            answer = self._exchange(connection, "POST", "generate", body)
            return Generation.of_chunks(parse_json_rows(json.loads(answer.read()), final=True))
        except (OSError, http.client.HTTPException) as error:
            raise RequestFailed(f"the connection to {self.url} broke ({error})", "UNAVAILABLE") from error
        except KeyboardInterrupt:
            self._cancel(request_id)
            raise
        finally:
            connection.close()

    def stream(
        self,
        prompt: str | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Generator[Chunk, None, None]:
        """Iterate over the chunks of an answer; closing the iterator closes the connection.

        Raises:
            RequestFailed: from the iterator, as in `generate`.
        """
        body = self.contract.json_body(prompt, input_ids, sampling, stream=True)
        connection = self._connect()
        try:
            answer = self._exchange(connection, "POST", "generate_stream", body)
            # The end of the response is the only end mark that Triton's server-sent events have.
            running = int(sampling.get("n") or 1)
            for event in parse_events(answer):
                chunks = parse_json_rows(event, final=False)
                running -= sum(chunk.finish_reason is not None for chunk in chunks)
                yield from (replace(chunk, final=not running) for chunk in chunks)
            if running:
                raise RequestFailed("the server closed the stream before the last response", "UNAVAILABLE")
        except (OSError, http.client.HTTPException) as error:
            raise RequestFailed(f"the connection to {self.url} broke ({error})", "UNAVAILABLE") from error
        finally:
            connection.close()

    def _cancel(self, request_id: str) -> None:
        if not self.contract.takes_cancel:
            return
        connection = self._connect()
        connection.timeout = _CANCEL_TIMEOUT_S
        # The request may have ended meanwhile, and a server that is gone runs nothing.
        with contextlib.suppress(RequestFailed, OSError, http.client.HTTPException):
            self._exchange(connection, "POST", "generate", {"id": request_id, "cancel": True}).read()
        connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        try:
            return http.client.HTTPConnection(self.url, timeout=self._timeout_s)
        except http.client.InvalidURL as error:
            raise RequestFailed(f"{self.url} is no host:port", "INVALID_ARGUMENT") from error

    def _exchange(
        self, connection: http.client.HTTPConnection, method: str, verb: str, body: dict[str, Any] | None = None
    ) -> http.client.HTTPResponse:
        content = None if body is None else json.dumps(body)
        try:
            connection.connect()
        except (OSError, UnicodeError) as error:
            raise RequestFailed(f"no server answers at {self.url}", "UNAVAILABLE") from error
        connection.request(method, f"/v2/models/{quote(self.model, safe='')}/{verb}", content)
        answer = connection.getresponse()
        if answer.status != 200:
            code = CODE_OF_STATUS.get(answer.status, "UNKNOWN")
            raise RequestFailed(error_text(answer.read()) or f"HTTP status {answer.status}", code)
        return answer


def parse_events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of every server-sent event in a body that is read line by line."""
    data: list[bytes] = []
    for line in lines:
        field, _, value = line.rstrip(b"\r\n").partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif not field and data:
            yield json.loads(b"\n".join(data))
            data = []
    if data:
        yield json.loads(b"\n".join(data))


def error_text(body: bytes) -> str:
    """The server's own words in the body of a refusal."""
    try:
        # `generate_stream` answers with an event even where it streams nothing.
        return str(json.loads(body.removeprefix(b"data:"))["error"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace").strip()
