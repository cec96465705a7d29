"""Static batching, as it is without a scheduler: a batch is formed once and computed until its last row is done.

Prompts are left-padded to the longest, every row is computed in every step, and each row holds KV blocks for the
longest total length. The padding is really computed; that is what this policy costs. Triton's dynamic batcher only
changes who forms the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from slipstream.config import EngineConfig
from slipstream.engine.batch import Batch, Chunk
from slipstream.engine.block_pool import BlockPool
from slipstream.engine.policy import BatchingPolicy
from slipstream.engine.request import FINISH_CANCELLED, Request

PADDING_TOKEN = 0


class LockstepScheduler(BatchingPolicy):
    """Runs one group of requests after the other, each group in lock step."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        super().__init__(config, pool)
        self.waiting: deque[Request] = deque()

    def add(self, request: Request, further: Sequence[Request] = ()) -> None:
        """Queue a request for the next group.

        Raises:
            InvalidRequest: its longest total length exceeds the whole pool.
        """
        assert not further
        self._refuse_what_never_fits(request.max_total_tokens)
        self.waiting.append(request)

    def abort(self, request: Request, now: float, reason: str = FINISH_CANCELLED, error: str | None = None) -> None:
        """End a request. In a running group its row goes on being computed, like that of any finished row."""
        request.finish(reason, now, error)
        if request not in self.running:
            self.waiting.remove(request)
        elif all(row.finished for row in self.running):
            self._disband()

    def schedule(self, now: float) -> Batch:
        """One step of the group: the padded prompts, or one token for every row, finished or not."""
        if not self.running:
            self._form_group(now)
            return Batch(
                [Chunk(r, [PADDING_TOKEN] * r.padding + r.token_ids, 0, sample=True) for r in self.running],
                num_prompt_padding=sum(request.padding for request in self.running),
            )
        chunks = []
        for row in self.running:
            token_id = PADDING_TOKEN if row.finished else row.token_ids[-1]
            chunks.append(Chunk(row, [token_id], row.padding + row.num_computed, sample=True))
        return Batch(chunks, num_finished_rows=sum(row.finished for row in self.running))

    def update(self, batch: Batch, token_ids: list[int], now: float) -> list[Request]:
        """Take in one token for each row; returns the requests that got one."""
        changed = []
        for chunk, token_id in zip(batch.chunks, token_ids, strict=True):
            request = chunk.request
            request.num_computed = chunk.start + chunk.num_tokens - request.padding
            if not request.finished:
                request.append(token_id, now)
                changed.append(request)
        if all(row.finished for row in self.running):
            self._disband()
        return changed

    def _form_group(self, now: float) -> None:
        """Take as many waiting requests, in order, as seats and KV reservations allow."""
        group: list[Request] = []
        reserved = 0
        for request in list(self.waiting)[: self._max_num_seqs]:
            blocks = self._reservation([*group, request])
            if blocks * (len(group) + 1) > self.pool.num_blocks:
                break
            group.append(request)
            reserved = blocks
        longest_prompt = max(request.num_prompt_tokens for request in group)
        for request in group:
            self.waiting.popleft()
            request.padding = longest_prompt - request.num_prompt_tokens
            request.first_scheduled_time = now
            request.block_table = self.pool.allocate(reserved)
            self.running.append(request)

    def _reservation(self, group: list[Request]) -> int:
        """Blocks of each row: the longest padded prompt plus the longest answer that any row may have."""
        prompt = max(request.num_prompt_tokens for request in group)
        return self.pool.blocks_for(prompt + max(request.sampling.max_tokens for request in group))

    def _disband(self) -> None:
        for request in self.running:
            self._release(request)
        self.running.clear()
