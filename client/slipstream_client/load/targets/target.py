"""What the load generator needs of a server, whatever it speaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slipstream_client.load.workload import WorkloadRequest
from slipstream_client.tensors import Chunk, Generation


@dataclass(slots=True)
class Attempt:
    """One attempt at one request: what is sent, and what has come of it so far, which stays where it fails."""

    id: str
    request: WorkloadRequest
    cache_salt: str  # of the run, so that none finds in a prefix cache what the one before it has computed
    chunks: list[tuple[float, int]] = field(default_factory=list)  # time.perf_counter() and tokens of every response
    input_tokens: int | None = None
    finish_reason: str | None = None
    output_ids: list[int] | None = None
    stats: dict[str, Any] | None = None

    def sampling(self) -> dict[str, Any]:
        """Sampling parameters of our own doors."""
        return self.request.sampling() | {"cache_salt": self.cache_salt}

    def note(self, at: float, num_tokens: int, said: Chunk | Generation) -> None:
        """A response at `time.perf_counter()`; the last one says more than the others."""
        self.chunks.append((at, num_tokens))
        if said.num_input_tokens is not None:
            self.input_tokens = said.num_input_tokens
        if said.finish_reason is not None:
            self.finish_reason = said.finish_reason
        if said.stats is not None:
            # The ids have a field of their own.
            self.stats = {key: value for key, value in said.stats.items() if key != "output_ids"} or None
            self.output_ids = said.stats.get("output_ids")


class LoadTarget(Protocol):
    """One model of one server, for one event loop. A context manager: what the model is, is known inside it."""

    @property
    def streams(self) -> bool:
        """An answer comes in pieces, so that its first token has a time."""

    @property
    def batch_size(self) -> int | None:
        """The most requests that are sent at once as one batch; None where the server does the batching."""

    async def send(self, attempts: Sequence[Attempt]) -> None:
        """Send one attempt, or a batch of them, and fill in what comes, to the last response; never sends twice.

        Raises:
            RequestFailed: refused or ended early; UNAVAILABLE is what may be tried again.
        """

    def describe(self) -> dict[str, Any]:
        """What results.json says of how requests are sent."""

    async def __aenter__(self) -> LoadTarget:
        """Connect, and find out what the model is.

        Raises:
            SlipstreamError: no such server or model, or one that cannot be asked in this way.
        """

    async def __aexit__(self, *_: object) -> None:
        """End the connections; the server cancels what still runs on them."""
