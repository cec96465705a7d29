"""A Triton model that streams text, ours or another's, over HTTP: `generate_stream` and its server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream_client.load.targets.http_session import parse_object, read_events
from slipstream_client.load.targets.target import Attempt
from slipstream_client.load.targets.token_counts import from_counts
from slipstream_client.load.targets.triton_target import TritonTarget
from slipstream_client.tensors import Chunk, RequestFailed, parse_json_rows


class GenerateStreamTarget(TritonTarget):
    """The end of the response is the only end mark that Triton's events have.

    So an answer is whole if its body was, and its last event has a finish reason; of other people's models some give
    none at all.
    """

    endpoint = "generate_stream"
    batch_size = None

    @property
    def streams(self) -> bool:
        return self._contract.decoupled

    async def send(self, attempts: Sequence[Attempt]) -> None:
        (attempt,) = attempts
        answer = _Answer()
        try:
            body = self._body(attempt, stream=True)
            async with self._session.exchange("POST", self._path(self.endpoint), body) as response:
                async for at, data in read_events(response):
                    answer.add(at, parse_object(data))
        finally:
            for at, tokens, chunk in zip(answer.times, answer.tokens(trusted=self.ours), answer.chunks, strict=True):
                attempt.note(at, tokens, chunk)
        reasons = [chunk.finish_reason for chunk in answer.chunks]
        if not reasons or (reasons[-1] is None and (self.ours or any(reasons))):
            raise RequestFailed("the server closed the stream before the last response", "UNAVAILABLE")

    def _problem(self) -> str | None:
        batches = "takes batches, which generate_stream cannot carry" if self._contract.client_batches else None
        return super()._problem() or batches


class _Answer:
    """The responses of one attempt as they came; what each of them carried is settled at the end."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.chunks: list[Chunk] = []
        self._counts: list[int | None] = []

    def add(self, at: float, event: dict[str, Any]) -> None:
        (chunk,) = parse_json_rows(event, final=False)
        self.times.append(at)
        self.chunks.append(chunk)
        self._counts.append(chunk.num_tokens if "num_output_tokens" in event else None)

    def tokens(self, *, trusted: bool) -> list[int]:
        """Of each response; `trusted`: its own count is of what is new in it."""
        if trusted:
            return [chunk.num_tokens for chunk in self.chunks]
        return from_counts([chunk.text for chunk in self.chunks], self._counts)
