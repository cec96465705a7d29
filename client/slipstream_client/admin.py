"""Ask the engines behind a Triton server how they are and what each of their steps computed: the model `admin`."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from slipstream_client.tensors import CHANNEL_OPTIONS, failure_of, read_strings, write_strings

MODEL = "admin"
_TIMEOUT_S = 10.0
_PAGE = 1000
_CLOCK_PROBES = 9


class AdminClient:
    """A connection to the model `admin` of one server.

    Every method raises `RequestFailed`: NOT_FOUND or UNAVAILABLE where the server does not have the model loaded,
    UNAVAILABLE where it is not enabled or no server answers, INVALID_ARGUMENT for an engine that does not exist.
    """

    def __init__(self, url: str = "127.0.0.1:8001") -> None:
        self.url = url
        self._channel = grpc.insecure_channel(url, options=CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def engines(self) -> list[str]:
        """Names of the engines."""
        return self._ask(type="engines")["engines"]

    def status(self, engine: str) -> dict[str, Any]:
        """What an engine says of now: requests running and waiting, KV blocks, steps so far, its clock."""
        return self._ask(type="status", engine=engine)

    def records(self, engine: str, since: int) -> Iterator[dict[str, Any]]:
        """The records of the steps from `since` on, oldest first; those that the engine has dropped are missing."""
        while True:
            page = self._ask(type="records", engine=engine, since=since, count=_PAGE)["records"]
            yield from page
            if len(page) < _PAGE:
                return
            since = page[-1]["index"] + 1

    def clock_offset_s(self, engine: str) -> float:
        """The engine's clock less `time.perf_counter()` here, off by at most half of an answer's time.

        As in Cristian's algorithm: the engine is taken to have read its clock in the middle of the fastest of a few
        exchanges.
        """
        offsets = []
        for _ in range(_CLOCK_PROBES):
            sent = time.perf_counter()
            clock_s = self.status(engine)["clock_s"]
            received = time.perf_counter()
            offsets.append((received - sent, clock_s - (sent + received) / 2))
        return min(offsets)[1]

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, **command: Any) -> dict[str, Any]:
        request = service_pb2.ModelInferRequest(model_name=MODEL, id=uuid.uuid4().hex)
        request.inputs.add(name="command", datatype="BYTES", shape=[1])
        request.raw_input_contents.append(write_strings([json.dumps(command).encode()]))
        try:
            response = self._stub.ModelInfer(request, timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            raise failure_of(error, self.url) from error
        return json.loads(read_strings(response.raw_output_contents[0])[0])
