"""A gRPC server that speaks Triton's protocol and misbehaves by script: what it answers is up to each test."""

from __future__ import annotations

import contextlib
import json
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc


@dataclass
class Say:
    """One response of a script."""

    tokens: list[int] = field(default_factory=list)  # output ids that this chunk carries
    text: str | None = None
    final: bool = False
    reason: str = "stop"
    stats: dict[str, Any] = field(default_factory=dict)


@dataclass
class Fail:
    """An error, which ends the request; as in the real models its text begins with the code."""

    text: str
    code: grpc.StatusCode = grpc.StatusCode.INTERNAL

    @property
    def message(self) -> str:
        return f"{self.code.name}: {self.text}"


@dataclass
class Wait:
    """Nothing for a while, or until the event is set."""

    seconds: float = 0.0
    event: threading.Event | None = None


@dataclass
class Received:
    """A request as it arrived."""

    id: str
    model: str
    texts: list[str]
    sampling: list[dict[str, Any]]
    inputs: dict[str, tuple[list[int], bytes]]  # shape and raw content, by name
    attempt: int  # how often this id came before

    @property
    def text(self) -> str:
        return self.texts[0]

    def rows(self) -> list[Received]:
        """Each row of a batch as if it had come alone."""
        pairs = zip(self.texts, self.sampling, strict=True)
        return [replace(self, texts=[text], sampling=[sampling]) for text, sampling in pairs]


Script = Callable[[Received], list[Say | Fail | Wait]]


def answer(ids: list[int], *, per_chunk: int = 1, gap_s: float = 0.0, **stats: Any) -> list[Say | Fail | Wait]:
    """A well-behaved stream of these ids."""
    chunks = [ids[start : start + per_chunk] for start in range(0, len(ids), per_chunk)]
    steps: list[Say | Fail | Wait] = []
    for position, chunk in enumerate(chunks):
        last = position == len(chunks) - 1
        steps.append(Say(chunk, final=last, stats={"inference_ms": 1.0, "output_ids": ids, **stats} if last else {}))
        if gap_s and not last:
            steps.append(Wait(gap_s))
    return steps


def ids_of_request(received: Received) -> list[int]:
    """As many ids as the request asked for, the same for the same text."""
    first = len(received.text)
    return [first + step for step in range(received.sampling[0]["stop_length"])]


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Models: continuous, continuous_unary, iterative (streams), dynamic, static; all follow `script`."""

    def __init__(self, port: int = 0) -> None:
        self.script: Script = lambda received: answer(ids_of_request(received))
        self.received: list[Received] = []
        self.cancelled: list[str] = []
        self.cancel_seen = threading.Event()
        self.num_streams = 0
        self.in_flight = 0
        self.most_in_flight = 0
        self.overslept_s = 0.0  # by so much a wait was longer than scripted, at most
        self._lock = threading.Lock()
        self._running: dict[str, threading.Event] = {}
        self._server = grpc.server(ThreadPoolExecutor(64))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.url = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"

    def __enter__(self) -> FakeTriton:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(grace=None).wait()

    def ServerMetadata(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerMetadataResponse(name="triton", version="fake")

    def ModelConfig(self, request: Any, context: Any) -> Any:
        if request.name not in CONFIGS:
            context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{request.name}' is not found")
        return service_pb2.ModelConfigResponse(config=CONFIGS[request.name])

    def ModelInfer(self, request: Any, context: Any) -> Any:
        if request.model_name not in CONFIGS:
            text = f"Request for unknown model: '{request.model_name}' is not found"
            context.abort(grpc.StatusCode.NOT_FOUND, text)
        received = self._receive(request)
        try:
            rows = [self._whole(self.script(row), context) for row in received.rows()]
            return _response(received.id, rows, batched=CONFIGS[received.model].max_batch_size > 0)
        finally:
            self._ended()

    def _whole(self, steps: list[Say | Fail | Wait], context: Any) -> Say:
        said = []
        for step in steps:
            if isinstance(step, Fail):
                context.abort(step.code, step.message)
            elif isinstance(step, Wait):
                self._wait(step, None)
            else:
                said.append(step)
        ids = [token for step in said for token in step.tokens]
        return Say(ids, said[-1].text, True, said[-1].reason, said[-1].stats)

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:
        with self._lock:
            self.num_streams += 1
        outgoing: SimpleQueue[Any] = SimpleQueue()
        broken = threading.Event()
        context.add_callback(broken.set)

        def serve(received: Received) -> None:
            cancelled = self._running[received.id]
            try:
                for step in self.script(received):
                    if isinstance(step, Wait):
                        self._wait(step, cancelled, broken)
                    if broken.is_set():
                        self._note_cancelled(received.id)
                        return
                    if cancelled.is_set():
                        self._note_cancelled(received.id)
                        step = Fail("Request was cancelled", grpc.StatusCode.CANCELLED)
                    if isinstance(step, Fail):
                        outgoing.put((received.id, step))
                        return
                    if isinstance(step, Say):
                        batched = CONFIGS[received.model].max_batch_size > 0
                        outgoing.put(_response(received.id, [step], batched, final=step.final))
            finally:
                self._ended()
                outgoing.put(None)

        def read() -> None:
            started = 0
            try:
                for request in requests:
                    if _is_cancel(request):
                        self._running[request.id].set()
                        outgoing.put(_response(request.id, [], False, final=True))
                        continue
                    received = self._receive(request)
                    self._running[received.id] = threading.Event()
                    started += 1
                    threading.Thread(target=serve, args=(received,), daemon=True).start()
            except Exception:
                pass  # the client left
            outgoing.put(started)

        threading.Thread(target=read, daemon=True).start()
        ended, total = 0, None
        while total is None or ended < total:
            item = outgoing.get()
            if item is None:
                ended += 1
            elif isinstance(item, int):
                total = item
            elif isinstance(item, tuple):
                request_id, failure = item
                message = service_pb2.ModelStreamInferResponse(error_message=failure.message)
                message.infer_response.id = request_id
                yield message
            else:
                yield service_pb2.ModelStreamInferResponse(infer_response=item)

    def _wait(self, step: Wait, *ends: threading.Event | None) -> None:
        deadline = time.monotonic() + (step.seconds or 30.0)
        while time.monotonic() < deadline:
            if (step.event and step.event.is_set()) or any(end and end.is_set() for end in ends):
                return
            time.sleep(min(0.005, max(deadline - time.monotonic(), 0)))
        self.overslept_s = max(self.overslept_s, time.monotonic() - deadline)

    def _receive(self, request: Any) -> Received:
        inputs = {
            tensor.name: (list(tensor.shape), content)
            for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        texts = _elements(inputs["text_input"][1]) if "text_input" in inputs else [""]
        sampling = [json.loads(text) for text in _elements(inputs["sampling_parameters"][1])]
        with self._lock:
            attempt = sum(earlier.id == request.id for earlier in self.received)
            received = Received(request.id, request.model_name, texts, sampling, inputs, attempt)
            self.received.append(received)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return received

    def _ended(self) -> None:
        with self._lock:
            self.in_flight -= 1

    def _note_cancelled(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        self.cancel_seen.set()


@contextlib.contextmanager
def interrupt_when(
    event: threading.Event, again_after_s: float = 5.0, number: signal.Signals = signal.SIGINT
) -> Iterator[None]:
    """Ctrl-C, or another signal, in the main thread once the event is set.

    Again if that had no effect for so long: Python loses one that arrives in a destructor.
    """
    main = threading.main_thread().ident
    assert main is not None
    ended = threading.Event()

    def interrupt() -> None:
        if event.wait(20):
            while not ended.is_set():
                signal.pthread_kill(main, number)
                ended.wait(again_after_s)

    threading.Thread(target=interrupt, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _is_cancel(request: Any) -> bool:
    return any(tensor.name == "cancel" for tensor in request.inputs)


def _elements(content: bytes) -> list[str]:
    found, position = [], 0
    while position < len(content):
        (length,) = struct.unpack_from("<I", content, position)
        found.append(content[position + 4 : position + 4 + length].decode())
        position += 4 + length
    return found


def _response(request_id: str, rows: list[Say], batched: bool, *, final: bool | None = None) -> Any:
    response = service_pb2.ModelInferResponse(id=request_id)
    if final is not None:
        response.parameters["triton_final_response"].bool_param = final
    if not rows:
        return response
    shape = [len(rows), 1] if batched else [1]
    texts = ["".join(f" {token}" for token in row.tokens) if row.text is None else row.text for row in rows]
    stats = [json.dumps(row.stats) if row.final else "" for row in rows]
    columns = {
        "text_output": ("BYTES", _packed(texts)),
        "finish_reason": ("BYTES", _packed([row.reason if row.final else "" for row in rows])),
        "num_input_tokens": ("UINT32", np.array([7] * len(rows), dtype="<u4").tobytes()),
        "num_output_tokens": ("UINT32", np.array([len(row.tokens) for row in rows], dtype="<u4").tobytes()),
        "stats": ("BYTES", _packed(stats)),
    }
    for name, (datatype, content) in columns.items():
        response.outputs.add(name=name, datatype=datatype, shape=shape)
        response.raw_output_contents.append(content)
    return response


def _packed(texts: list[str]) -> bytes:
    return b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)


def _config(name: str, inputs: list[str], *, decoupled: bool, batch: int, **scheduling: Any) -> Any:
    config = model_config_pb2.ModelConfig(name=name, max_batch_size=batch, **scheduling)
    config.model_transaction_policy.decoupled = decoupled
    for tensor in inputs:
        config.input.add(name=tensor)
    return config


_TWO = ["text_input", "sampling_parameters"]
_MANY = [*_TWO, "input_ids", "cancel", "return_finish_reason", "return_num_input_tokens"]
_MANY += ["return_num_output_tokens", "return_stats"]
_BATCHER = model_config_pb2.ModelDynamicBatching()
_SEQUENCES = model_config_pb2.ModelSequenceBatching()

CONFIGS = {
    "continuous": _config("continuous", [*_MANY, "stream"], decoupled=True, batch=0),
    "continuous_unary": _config("continuous_unary", _MANY, decoupled=False, batch=0),
    "iterative": _config("iterative", _TWO, decoupled=True, batch=16, sequence_batching=_SEQUENCES),
    "dynamic": _config("dynamic", _TWO, decoupled=False, batch=16, dynamic_batching=_BATCHER),
    "static": _config("static", _TWO, decoupled=False, batch=16),
}
