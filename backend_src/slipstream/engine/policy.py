"""What every batching policy is to the engine: who waits, who runs, and what a step computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from slipstream.config import EngineConfig
from slipstream.engine.batch import Batch
from slipstream.engine.block_pool import BlockPool
from slipstream.engine.prefix_cache import PrefixCache
from slipstream.engine.request import FINISH_CANCELLED, Request
from slipstream.errors import InvalidRequest


class BatchingPolicy(ABC):
    """Owns the requests it was given until they have finished, and their blocks."""

    waiting: Collection[Request]

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self.pool = pool
        self.cache: PrefixCache | None = None
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._max_num_seqs = config.max_num_seqs

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def num_running(self) -> int:
        return sum(not request.finished for request in self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def stuck(self) -> Request | None:
        """Who is to go where nothing can be computed and nothing else will change that; None where a door may."""
        return None

    @property
    def num_held_tokens(self) -> int:
        """Tokens of unfinished requests whose keys and values lie in the pool: shared ones once, padding not."""
        held = sum(request.num_computed for request in self.running if not request.finished)
        return held - self.pool.num_shares * self.pool.block_size  # what is shared is full

    @abstractmethod
    def add(self, request: Request, further: Sequence[Request] = ()) -> None:
        """Take in a request, and the further choices of its prompt, which only the continuous policy has.

        Raises:
            InvalidRequest: it can never be computed.
            Unavailable: the queue is full.
        """

    @abstractmethod
    def abort(self, request: Request, now: float, reason: str = FINISH_CANCELLED, error: str | None = None) -> None:
        """End a request wherever it is."""

    @abstractmethod
    def schedule(self, now: float) -> Batch:
        """Choose what the next step computes."""

    @abstractmethod
    def update(self, batch: Batch, token_ids: list[int], now: float) -> list[Request]:
        """Take in one id for each sampled chunk; returns the requests of which there is news."""

    def shrink_budget(self, num_tokens: int) -> None:  # noqa: B027  most policies have none
        """Schedule no more than about so many tokens in a step from now on: the device has no memory for more."""

    def check(self) -> None:
        """Assert the invariants that hold between steps."""
        self.pool.check([request.block_table for request in self.running])

    def _refuse_what_never_fits(self, num_tokens: int) -> None:
        if self.pool.blocks_for(num_tokens) > self.pool.num_blocks:
            raise InvalidRequest(
                f"the request needs {num_tokens} tokens of KV cache at once; the whole pool has "
                f"{self.pool.num_blocks * self.pool.block_size}"
            )

    def _release(self, request: Request) -> None:
        self.pool.free(request.block_table)
        request.block_table = []
