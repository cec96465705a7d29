"""A Triton model that answers all at once, over HTTP: `infer` with JSON tensors, which can carry a batch too."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream_client.load.targets.http_session import parse_object
from slipstream_client.load.targets.target import Attempt
from slipstream_client.load.targets.triton_target import TritonTarget
from slipstream_client.tensors import Chunk, RequestFailed, parse_json_rows

_DATATYPES = {bool: "BOOL", int: "INT32", str: "BYTES"}


class InferTarget(TritonTarget):
    """`infer` rather than `generate`: that has no batch dimension, which the static batcher is all about."""

    endpoint = "infer"
    streams = False

    @property
    def batch_size(self) -> int | None:
        return self._contract.max_batch_size if self._contract.client_batches else None

    async def send(self, attempts: Sequence[Attempt]) -> None:
        body = {"id": attempts[0].id, "inputs": self._tensors([self._body(each, stream=False) for each in attempts])}
        async with self._session.exchange("POST", self._path(self.endpoint), body) as response:
            answer = await response.read()
            now = time.perf_counter()
        for attempt, chunk in zip(attempts, _rows(parse_object(answer)), strict=True):
            attempt.note(now, chunk.num_tokens, chunk)

    def _problem(self) -> str | None:
        streams = "streams, which infer cannot carry" if self._contract.decoupled else None
        return super()._problem() or streams

    def _tensors(self, bodies: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Each input as a tensor [n, 1], or [1] where the model has no batch dimension."""
        shape = [len(bodies), 1] if self._contract.max_batch_size else [1]
        return [
            {
                "name": name,
                "shape": shape,
                "datatype": _DATATYPES[type(value)],
                "data": [body[name] for body in bodies],
            }
            for name, value in bodies[0].items()
        ]


def _rows(answer: Mapping[str, Any]) -> list[Chunk]:
    columns = {tensor["name"]: tensor["data"] for tensor in answer.get("outputs", [])}
    if "num_output_tokens" not in columns:
        raise RequestFailed("the model does not say how many tokens its answer has", "UNIMPLEMENTED")
    return parse_json_rows(columns, final=True)
