"""Generate text from a Slipstream model over gRPC: `tritonclient` has no `generate()` of its own."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from slipstream_client.multiplex import SharedStream, Stream
from slipstream_client.tensors import (
    CHANNEL_OPTIONS,
    Chunk,
    Generation,
    ModelContract,
    RequestFailed,
    SamplingOptions,
    failure_of,
    is_final,
    parse_rows,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

_CANCEL_TIMEOUT_S = 5.0


class SlipstreamClient:
    """One model of one server. Thread safe; requests of all threads share one gRPC stream where the model allows it.

    `timeout_s` bounds each request from sending to its last response; one that takes longer is cancelled and fails as
    DEADLINE_EXCEEDED. Without it a request waits for ever where Triton forgets it, as it does when a model's process is
    killed.

    >>> with SlipstreamClient() as client:
    ...     for chunk in client.stream("Once upon a time", max_tokens=32):
    ...         print(chunk.text, end="", flush=True)
    """

    def __init__(
        self, url: str = "127.0.0.1:8001", model: str = "continuous", *, timeout_s: float | None = None
    ) -> None:
        self.url = url
        self.model = model
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(url, options=CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._shared = SharedStream(self._stub, url)
        self._contract: ModelContract | None = None
        self._contract_lock = threading.Lock()

    @property
    def contract(self) -> ModelContract:
        """The model's contract, asked of the server once."""
        with self._contract_lock:
            if self._contract is None:
                try:
                    answer = self._stub.ModelConfig(service_pb2.ModelConfigRequest(name=self.model))
                except grpc.RpcError as error:
                    raise failure_of(error, self.url) from error
                self._contract = ModelContract.of_config(answer.config)
            return self._contract

    def generate(
        self,
        prompt: str | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        request_id: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Generation:
        """Return the whole answer to a prompt or to token ids.

        Raises:
            RequestFailed: the server refused the request or ended it early.
        """
        with self._send(prompt, input_ids, request_id, sampling, stream=False) as chunks:
            return Generation.of_chunks(chunks)

    def stream(
        self,
        prompt: str | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        request_id: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> ChunkStream:
        """Send a request at once and return the iterator over its chunks; closing it cancels the request.

        A model that does not stream gives one chunk.

        Raises:
            RequestFailed: here or from the iterator, as in `generate`.
        """
        return self._send(prompt, input_ids, request_id, sampling, stream=True)

    def cancel(self, request_id: str) -> None:
        """Cancel a running request by its id, whichever client sent it; its iterator then raises `RequestFailed`.

        Raises:
            RequestFailed: the model has no `cancel` input, or no server answers.
        """
        if not self.contract.takes_cancel:
            raise RequestFailed(f"model {self.model} cannot cancel by id; close the iterator instead", "UNIMPLEMENTED")
        # A stream of its own: the answer has the id of the request it cancels.
        request = self.contract.cancel_request(request_id)
        try:
            for _ in self._stub.ModelStreamInfer(iter([request]), timeout=_CANCEL_TIMEOUT_S):
                pass
        except grpc.RpcError as error:
            raise failure_of(error, self.url) from error

    def close(self) -> None:
        """End the connection; the server cancels what still runs on it."""
        self._shared.close()
        self._channel.close()

    def __enter__(self) -> SlipstreamClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(
        self,
        prompt: str | None,
        input_ids: Sequence[int] | None,
        request_id: str | None,
        sampling: SamplingOptions,
        *,
        stream: bool,
    ) -> ChunkStream:
        contract = self.contract
        request_id = request_id or uuid.uuid4().hex
        request = contract.request(request_id, prompt, input_ids, sampling, stream=stream)
        if not contract.decoupled:
            responses: _Responses = _UnaryResponses(self._stub.ModelInfer.future(request), self.url)
        elif contract.takes_cancel:
            responses = _SharedResponses(self, self._shared, request)
        else:
            responses = _OwnStreamResponses(Stream(self._stub, self.url), request)
        return ChunkStream(request_id, responses, self._timeout_s)


class ChunkStream(Iterator[Chunk]):
    """The chunks of one request, in order. Closing it before the last one cancels the request at the server."""

    def __init__(self, request_id: str, responses: _Responses, timeout_s: float | None) -> None:
        self.request_id = request_id
        self._responses = responses
        self._timeout_s = timeout_s
        self._start = time.monotonic()
        self._ended = False
        self._rows: deque[Chunk] = deque()  # of the last response: it has one for each choice where it is the only one

    def __next__(self) -> Chunk:
        if self._rows:
            return self._rows.popleft()
        if self._ended:
            raise StopIteration
        left_s = None if self._timeout_s is None else max(0.0, self._start + self._timeout_s - time.monotonic())
        try:
            response = self._responses.receive(left_s)
        except queue.Empty:
            self.close()
            raise RequestFailed(f"not answered within {self._timeout_s:g} s", "DEADLINE_EXCEEDED") from None
        except RequestFailed:
            self._ended = True
            raise
        self._ended = is_final(response)
        self._rows.extend(parse_rows(response))
        return self._rows.popleft()

    def close(self) -> None:
        """Cancel the request if it still runs."""
        if not self._ended:
            self._ended = True
            self._responses.cancel()

    def __enter__(self) -> ChunkStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._ended:
            return
        # An iterator that was dropped half-way still ends its request, but never from inside the garbage collector:
        # it may run in a thread that holds the stream's lock.
        with contextlib.suppress(RuntimeError):  # the interpreter is shutting down: so is the connection
            threading.Thread(target=self._responses.cancel, daemon=True).start()


class _Responses(Protocol):
    """Where the responses of one request come from."""

    def receive(self, timeout_s: float | None) -> service_pb2.ModelInferResponse:
        """Wait for the next response; raises `RequestFailed`, and `queue.Empty` when the time is up."""

    def cancel(self) -> None:
        """Stop the request at the server."""


class _SharedResponses:
    """Of a request on the shared stream: cancelled by a second request with its id."""

    def __init__(self, client: SlipstreamClient, shared: SharedStream, request: service_pb2.ModelInferRequest) -> None:
        self._client = client
        self._shared = shared
        self._request_id = request.id
        self._inbox = shared.send(request)

    def receive(self, timeout_s: float | None) -> service_pb2.ModelInferResponse:
        received = self._inbox.get(timeout=timeout_s)
        if isinstance(received, RequestFailed):
            raise received
        return received

    def cancel(self) -> None:
        self._shared.forget(self._request_id)
        # A server that is gone runs nothing; gRPC raises ValueError where the connection was closed here.
        with contextlib.suppress(RequestFailed, ValueError):
            self._client.cancel(self._request_id)


class _OwnStreamResponses:
    """Of a request that has a stream to itself: cancelled with the stream."""

    def __init__(self, stream: Stream, request: service_pb2.ModelInferRequest) -> None:
        self._stream = stream
        self._inbox = stream.open(request)

    def receive(self, timeout_s: float | None) -> service_pb2.ModelInferResponse:
        received = self._inbox.get(timeout=timeout_s)
        failed = isinstance(received, RequestFailed)
        if failed or is_final(received):
            self._stream.close()
        if failed:
            raise received
        return received

    def cancel(self) -> None:
        self._stream.close()


class _UnaryResponses:
    """Of plain inference: one response, cancelled with the call."""

    def __init__(self, call: Any, url: str) -> None:
        self._call = call
        self._url = url
        self._ended: SimpleQueue[Any] = SimpleQueue()
        call.add_done_callback(self._ended.put)

    def receive(self, timeout_s: float | None) -> service_pb2.ModelInferResponse:
        # Not inside gRPC, where Ctrl-C can leave a lock behind that nothing opens again.
        self._ended.get(timeout=timeout_s)
        try:
            return self._call.result()
        except grpc.RpcError as error:
            raise failure_of(error, self._url) from error
        except grpc.FutureCancelledError as error:
            raise RequestFailed("the request was cancelled", "CANCELLED") from error

    def cancel(self) -> None:
        self._call.cancel()
