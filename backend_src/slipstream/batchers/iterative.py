"""The policy under Triton's iterative sequences: Triton decides, by calling, which sequences are computed in a step.

Each call names the sequences of one iteration. A new one brings its whole prompt, an old one its next token. There is
no token budget and no preemption: a sequence reserves KV blocks for prompt + max_tokens when it starts, and one that
finds no room gets nothing in that iteration and is called again.
"""

from __future__ import annotations

from slipstream.config import EngineConfig
from slipstream.engine.batch import Batch, Chunk
from slipstream.engine.block_pool import BlockPool
from slipstream.engine.request import FINISH_CANCELLED, Request
from slipstream.errors import InvalidRequest


class IterativeScheduler:
    """Computes exactly the sequences that the current iteration names."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self.pool = pool
        self.waiting: list[Request] = []  # added, not yet computed for want of seats or blocks
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._max_num_seqs = config.max_num_seqs
        self._named: set[Request] = set()

    @property
    def has_work(self) -> bool:
        return bool(self._named)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_held_tokens(self) -> int:
        """Tokens whose keys and values lie in the pool."""
        return sum(request.num_computed for request in self.running)

    def add(self, request: Request) -> None:
        """Take in a new sequence and name it for the next iteration.

        Raises:
            InvalidRequest: its longest total length exceeds the whole pool.
        """
        if self.pool.blocks_for(request.max_total_tokens) > self.pool.num_blocks:
            raise InvalidRequest(
                f"the request needs {request.max_total_tokens} tokens of KV cache; the whole pool has "
                f"{self.pool.num_blocks * self.pool.block_size}"
            )
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
            self._release(request)
        else:
            self.waiting.remove(request)

    def schedule(self, now: float) -> Batch:
        """The named sequences' next tokens."""
        for request in list(self.waiting):
            blocks = self.pool.blocks_for(request.max_total_tokens)
            if request not in self._named:
                continue
            if len(self.running) >= self._max_num_seqs:
                request.waited.seats += 1
            elif blocks > self.pool.num_free:
                request.waited.blocks += 1
            else:
                request.block_table = self.pool.allocate(blocks)
                request.first_scheduled_time = now
                self.waiting.remove(request)
                self.running.append(request)
        named = [request for request in self.running if request in self._named]
        return Batch([Chunk(r, r.token_ids[r.num_computed :], r.num_computed, sample=True) for r in named])

    def update(self, batch: Batch, token_ids: list[int], eos_token_ids: frozenset[int], now: float) -> list[Request]:
        """Take in one token for each computed sequence; returns every named one, also those that got nothing."""
        for chunk, token_id in zip(batch.chunks, token_ids, strict=True):
            chunk.request.num_computed += chunk.num_tokens
            chunk.request.append(token_id, eos_token_ids, now)
            if chunk.request.finished:
                self._release(chunk.request)
        named = list(self._named)
        self._named.clear()
        return named

    def check(self) -> None:
        """Assert the invariants that hold between steps."""
        self.pool.check([request.block_table for request in self.running])

    def _release(self, request: Request) -> None:
        self.pool.free(request.block_table)
        request.block_table = []
        self.running.remove(request)
