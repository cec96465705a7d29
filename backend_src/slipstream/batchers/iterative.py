"""The policy under Triton's iterative sequences: Triton decides, by calling, which sequences are computed in a step.

Each call names the sequences of one iteration. A new one brings its whole prompt, an old one its next token. There is
no token budget and no preemption: a sequence reserves KV blocks for prompt + max_tokens when it starts, and one that
finds no room gets nothing in that iteration and is called again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from slipstream.config import EngineConfig
from slipstream.engine.batch import Batch, Chunk
from slipstream.engine.block_pool import BlockPool
from slipstream.engine.policy import BatchingPolicy
from slipstream.engine.request import FINISH_CANCELLED, Request


class IterativeScheduler(BatchingPolicy):
    """Computes exactly the sequences that the current iteration names."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        super().__init__(config, pool)
        self.waiting: deque[Request] = deque()  # what was added and not yet computed, for want of seats or blocks
        self._named: set[Request] = set()

    @property
    def has_work(self) -> bool:
        return bool(self._named)

    def add(self, request: Request, further: Sequence[Request] = ()) -> None:
        """Take in a new sequence and name it for the next iteration.

        Raises:
            InvalidRequest: its longest total length exceeds the whole pool.
        """
        assert not further
        self._refuse_what_never_fits(request.max_total_tokens)
        self.waiting.append(request)
        self._named.add(request)

    def advance(self, request: Request) -> None:
        """Name a sequence that was added before for the next iteration."""
        self._named.add(request)

    def abort(self, request: Request, now: float, reason: str = FINISH_CANCELLED, error: str | None = None) -> None:
        """End a sequence; its blocks are free when this returns."""
        request.finish(reason, now, error)
        self._named.discard(request)
        if request in self.running:
            self._leave(request)
        else:
            self.waiting.remove(request)

    def schedule(self, now: float) -> Batch:
        """The named sequences' next tokens; those that wait for room start in the order in which they came."""
        out_of_blocks = False
        for request in [request for request in self.waiting if request in self._named]:
            blocks = self.pool.blocks_for(request.max_total_tokens)
            out_of_blocks = out_of_blocks or blocks > self.pool.num_free
            if len(self.running) >= self._max_num_seqs:
                request.waited.seats += 1
            elif out_of_blocks:
                request.waited.blocks += 1
            else:
                request.block_table = self.pool.allocate(blocks)
                request.first_scheduled_time = now
                self.waiting.remove(request)
                self.running.append(request)
        named = [request for request in self.running if request in self._named]
        return Batch([Chunk(r, r.token_ids[r.num_computed :], r.num_computed, sample=True) for r in named])

    def update(self, batch: Batch, token_ids: list[int], now: float) -> list[Request]:
        """Take in one token for each computed sequence; returns every named one, also those that got nothing."""
        for chunk, token_id in zip(batch.chunks, token_ids, strict=True):
            chunk.request.num_computed += chunk.num_tokens
            chunk.request.append(token_id, now)
            if chunk.request.finished:
                self._leave(chunk.request)
        named = list(self._named)
        self._named.clear()
        return named

    def _leave(self, request: Request) -> None:
        self._release(request)
        self.running.remove(request)
