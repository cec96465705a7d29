"""May a waiting request start now? Two answers: `optimistic`, from a forecast, and `no_evict`, from a guarantee."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from slipstream.engine.block_pool import BlockPool
from slipstream.engine.request import Request


class LengthHistory:
    """Output lengths of the requests that finished last, as the forecast of those that run."""

    def __init__(self, window: int = 256) -> None:
        self._recent: deque[int] = deque(maxlen=window)
        self._ordered: list[int] = []
        self._totals: list[int] = [0]

    def record(self, num_output_tokens: int) -> None:
        self._recent.append(num_output_tokens)
        self._ordered = sorted(self._recent)
        self._totals = [0, *accumulate(self._ordered)]

    def expected(self, num_output_tokens: int) -> float | None:
        """Mean final length of recent requests that grew beyond `num_output_tokens`; None if none did."""
        position = bisect_right(self._ordered, num_output_tokens)
        longer = len(self._ordered) - position
        return (self._totals[-1] - self._totals[position]) / longer if longer else None


class Optimistic:
    """Admits while the forecast peak of all running sequences and the new one fits into the pool.

    The peak is that of the past-future scheduler (Gong et al., ASPLOS 2025): with sequences ordered by how long they
    are still expected to run, the pool is fullest at one of the moments at which a sequence ends. What is admitted
    wrongly is put right by preemption.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._history = LengthHistory()

    def record(self, request: Request) -> None:
        """Learn from a finished request."""
        self._history.record(request.num_output_tokens)

    def admits(self, candidate: Request, running: Sequence[Request], cached: list[int]) -> bool:
        """Whether a request may start now whose first blocks are `cached`."""
        pool = self._pool
        kept = pool.num_kept_of(cached)
        # One that has come to fill the whole pool, and had to give way, gets its last token and ends.
        needed = min(pool.blocks_for(candidate.num_tokens + 1), pool.num_blocks)
        if needed - len(cached) + kept > pool.num_free:
            return False
        forecast = [(self._remaining(candidate), pool.blocks_for(candidate.num_tokens) - len(cached) + kept)]
        held = pool.num_used  # first by several sequences, and assumed to stay so
        for request in running:
            exclusive = pool.num_exclusive(request.block_table)
            held -= exclusive
            shared = len(request.block_table) - exclusive
            forecast.append((self._remaining(request), pool.blocks_for(request.num_tokens) - shared))
        for count, (remaining, num_blocks) in enumerate(sorted(forecast, reverse=True), start=1):
            held += num_blocks
            if count > 1 and held + count * (remaining / pool.block_size) > pool.num_blocks:
                return False
        return True

    def _remaining(self, request: Request) -> float:
        """Tokens still expected; with nothing to learn from, one block."""
        expected = self._history.expected(request.num_output_tokens)
        growth = self._pool.block_size if expected is None else expected - request.num_output_tokens
        return min(growth, request.max_total_tokens - request.num_tokens)


class NoEvict:
    """Admits only what can finish even if every sequence runs to its max_tokens, so nothing is ever preempted."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def record(self, request: Request) -> None:
        """Nothing to learn: the guarantee does not depend on the past."""

    def admits(self, candidate: Request, running: Sequence[Request], cached: list[int]) -> bool:
        """Whether a request may start now; a block that several hold is counted for each, since any may end first."""
        needed = sum(self._pool.blocks_for(r.max_total_tokens) for r in (*running, candidate))
        return needed <= self._pool.num_blocks
