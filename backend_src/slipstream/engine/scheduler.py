"""The continuous scheduler: every step it decides anew which tokens of which sequences are computed.

There is one rule for all sequences: each catches up `num_computed` to `num_tokens`, a long prompt in chunks, a running
answer by one token. Running sequences come first, then the queue, while seats, token budget and blocks last. Who is
next in the queue, and who has to make room, is the business of `queue_order`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice

from slipstream.config import EngineConfig
from slipstream.engine.admission import NoEvict, Optimistic
from slipstream.engine.batch import Batch, Chunk
from slipstream.engine.block_pool import BlockPool
from slipstream.engine.policy import BatchingPolicy
from slipstream.engine.prefix_cache import PrefixCache
from slipstream.engine.queue_order import Fair, Fcfs, Priority, QueueOrder
from slipstream.engine.request import (
    FINISH_CANCELLED,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    FINISH_TIMEOUT,
    UNAVAILABLE,
    Lacking,
    Request,
)
from slipstream.errors import InvalidRequest, Unavailable

# Of a prompt's tokens that are scored, so many at most in one step: each takes a row of logits.
_MOST_SCORED_TOKENS = 512


@dataclass(slots=True)
class Beginning:
    """What lies in the cache already of a request that is not computed at all.

    `blocks` are full: first those that the prefix cache has `found`, then the ones of its first choice. The rest of the
    `num_tokens`, part of a block, is to be copied from block `tail`.
    """

    blocks: list[int]
    num_found: int
    num_tokens: int
    tail: int | None = None


class ContinuousScheduler(BatchingPolicy):
    """Iteration-level scheduling over a paged KV pool.

    The further choices of a request (n > 1) stay out of the queue until the first has computed the prompt. From then on
    each is a request like any other, except that it starts with the first one's blocks of the prompt: full ones are
    shared, the one that it writes to is a copy. Where the first has gone, it computes the prompt itself.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool, token_budget: int) -> None:
        # `running` is in order of admission.
        super().__init__(config, pool)
        self.waiting: QueueOrder = make_queue(config)
        if config.prefix_cache:
            self.cache = PrefixCache(pool)
        self._token_budget = token_budget
        self._chunked_prefill = config.chunked_prefill
        self._admission = NoEvict(pool) if config.admission == "no_evict" else Optimistic(pool)
        self._no_evict = config.admission == "no_evict"
        # An urgent request is not made to wait for blocks that less urgent ones have taken meanwhile.
        self._look_past = 0 if config.queue_order == "priority" else config.look_past
        self._longest_chunk = config.long_prefill_token_threshold if config.chunked_prefill else 0
        self._max_queued_requests = config.max_queued_requests
        self._max_queued_tokens = config.max_queued_tokens
        self._queued_tokens = 0
        self._expired: list[Request] = []  # past their deadline, and not reported yet
        self._held_back: dict[Request, list[Request]] = {}  # by their first choice

    @property
    def num_waiting(self) -> int:
        """See BatchingPolicy.num_waiting."""
        return len(self.waiting) + sum(map(len, self._held_back.values()))

    def add(self, request: Request, further: Sequence[Request] = ()) -> None:
        """Queue a request; its further choices are held back until it has computed their prompt.

        Raises:
            InvalidRequest: it can never fit.
            Unavailable: the queue is full.
        """
        most = request.max_total_tokens if self._no_evict else request.num_tokens + 1
        self._refuse_what_never_fits(most)
        if not self._chunked_prefill and request.num_tokens > self._token_budget:
            raise InvalidRequest(
                f"the prompt has {request.num_tokens} tokens; without chunked_prefill at most "
                f"max_num_batched_tokens = {self._token_budget} are computed in one step"
            )
        # As many as there are free seats are only passing through.
        queued = self.num_waiting - (self._max_num_seqs - len(self.running))
        if queued >= self._max_queued_requests:
            raise Unavailable(f"the queue is full: {queued} requests wait, max_queued_requests allows no more")
        num_tokens = request.num_tokens * (1 + len(further))
        if self.num_waiting and self._queued_tokens + num_tokens > self._max_queued_tokens:
            raise Unavailable(
                f"the queue is full: {self._queued_tokens} tokens wait, {num_tokens} more would exceed "
                f"max_queued_tokens = {self._max_queued_tokens}"
            )
        self._queued_tokens += num_tokens
        self.waiting.push(request)
        if further:
            self._held_back[request] = list(further)

    def shrink_budget(self, num_tokens: int) -> None:
        """See BatchingPolicy.shrink_budget; each sequence keeps its one token, and whole prompts stay whole."""
        if self._chunked_prefill:
            self._token_budget = min(self._token_budget, max(num_tokens, self._max_num_seqs))

    @property
    def stuck(self) -> Request | None:
        """The first that runs, or else the first that waits: the others wait for it."""
        return next(chain(self.running, self.waiting), None)

    def abort(self, request: Request, now: float, reason: str = FINISH_CANCELLED, error: str | None = None) -> None:
        """End a request wherever it is; its blocks are free when this returns."""
        request.finish(reason, now, error)
        if reason == FINISH_STOP:
            self._admission.record(request)
        self._withdraw(request)

    def schedule(self, now: float) -> Batch:
        """Choose what the next step computes. Every running sequence has blocks for all it is to compute."""
        self._expire(now)
        chunks: dict[Request, Chunk] = {}
        budget = self._token_budget
        known = preemptions = self.num_preemptions
        for position, request in enumerate(list(self.running)):
            if request.block_table == [] or request.finished:
                continue  # preempted, or ended by outgrowing the pool, earlier in this step
            # One token of the budget stays for each sequence after this one, so a chunk never starves a decode.
            kept = len(self.running) - position - 1
            count = self._chunk_length(request, request.num_computed, budget - kept)
            if count and self._grow(request, count, chunks, now):
                chunks[request] = self._chunk(request, count)
                budget -= count
            elif not count:
                request.waited.budget += 1
            if self.num_preemptions != known:
                # A victim that was in the batch has given its tokens back.
                budget, known = self._budget_left(chunks), self.num_preemptions
        if self.num_preemptions == preemptions:
            self._admit(chunks, now)
        else:
            self._note_what_is_lacking("blocks")
        return Batch(list(chunks.values()))

    def update(self, batch: Batch, token_ids: list[int], now: float) -> list[Request]:
        """Take in one id for each sampled chunk; returns the requests that got a token or ended."""
        for chunk in batch.chunks:
            chunk.request.num_computed += chunk.num_tokens
            if chunk.request in self._held_back and chunk.request.num_computed >= chunk.request.num_prompt_tokens:
                self._queue_choices_of(chunk.request)
        changed = [chunk.request for chunk in batch.sampled]
        for request, token_id in zip(changed, token_ids, strict=True):
            request.append(token_id, now)
        if self.cache is not None:
            for chunk in batch.chunks:
                if chunk.request.error is None:
                    self.cache.offer(chunk.request)
        for request in [request for request in self.running if request.finished]:
            self._release(request)
            self.running.remove(request)
            self._admission.record(request)
            if request not in changed:
                changed.append(request)
        changed += self._expired
        self._expired = []
        return changed

    def check(self) -> None:
        """Assert the invariants that hold between steps."""
        super().check()
        for request in self.running:
            assert len(request.block_table) >= self.pool.blocks_for(request.num_computed)
            assert request.num_computed < request.num_tokens
        held_back = list(chain.from_iterable(self._held_back.values()))
        for request in (*self.waiting, *held_back):
            assert not request.block_table
            assert request.num_computed == 0
        assert self._queued_tokens == sum(request.num_tokens for request in (*self.waiting, *held_back))
        assert all(first in self.running or first in self.waiting for first in self._held_back)
        assert len(self.running) <= self._max_num_seqs

    def _expire(self, now: float) -> None:
        """End what is past its deadline: with the tokens so far, or where it has never run with an error."""
        everyone = chain(self.running, self.waiting, *self._held_back.values())
        for request in [request for request in everyone if now > request.deadline]:
            if request.started:
                request.finish(FINISH_TIMEOUT, now)
            else:
                waited_s, allowed_s = now - request.arrival_time, request.deadline - request.arrival_time
                error = f"deadline: still in the queue after {waited_s:.3f} s; {allowed_s:g} s were allowed"
                request.finish(FINISH_ERROR, now, error, UNAVAILABLE)
            self._withdraw(request)
            self._expired.append(request)

    def _withdraw(self, request: Request) -> None:
        """Take a request out, wherever it is; its blocks are free when this returns."""
        if request in self.running:
            self._release(request)
            self.running.remove(request)
        else:
            held_back = self._held_back.get(request.first, []) if request.first is not None else []
            (held_back if request in held_back else self.waiting).remove(request)
            self._queued_tokens -= request.num_tokens
        if request in self._held_back:
            self._queue_choices_of(request)

    def _queue_choices_of(self, first: Request) -> None:
        """Let the further choices of a request wait for their turn."""
        for choice in self._held_back.pop(first):
            self.waiting.push(choice)

    def _admit(self, chunks: dict[Request, Chunk], now: float) -> None:
        displaced: list[Request] = []  # in this step: to come back in it they need not have gone
        while (request := next(iter(self.waiting), None)) is not None:
            lacking = "blocks" if request in displaced else self._try_to_admit(request, chunks, now)
            if lacking is None:
                continue
            if lacking != "budget" and (victim := self._make_room(request, chunks)) is not None:
                displaced.append(victim)
                continue
            if lacking != "blocks" or not self._admit_one_behind(request, chunks, now):
                self._note_what_is_lacking(lacking)
                return

    def _try_to_admit(self, request: Request, chunks: dict[Request, Chunk], now: float) -> Lacking | None:
        """Admit a waiting request, or say what it lacks."""
        if len(self.running) == self._max_num_seqs:
            return "seats"
        beginning = self._beginning_of(request)
        count = self._chunk_length(request, beginning.num_tokens, self._budget_left(chunks))
        if not count:
            return "budget"
        if not self._admission.admits(request, self.running, beginning.blocks):
            return "blocks"
        self.waiting.remove(request)
        self._queued_tokens -= request.num_tokens
        self._start(request, beginning, count, now)
        chunks[request] = self._chunk(request, count)
        if beginning.tail is not None:
            chunks[request].copy = (beginning.tail, request.block_table[len(beginning.blocks)])
        return None

    def _beginning_of(self, request: Request) -> Beginning:
        size = self.pool.block_size
        found = self.cache.find(request) if self.cache is not None and not request.scores_prompt else []
        first = request.first
        # Of the prompt's last token the logits are needed, where no answer has begun.
        shared = min(request.num_prompt_tokens, request.num_tokens - 1)
        if first is None or not first.block_table or first.num_computed < shared or shared <= len(found) * size:
            return Beginning(found, len(found), len(found) * size)
        full = shared // size
        tail = first.block_table[full] if shared % size else None
        return Beginning(found + first.block_table[len(found) : full], len(found), shared, tail)

    def _make_room(self, request: Request, chunks: dict[Request, Chunk]) -> Request | None:
        """Preempt one running sequence that has to give way to a waiting one; None if there is none."""
        gives_way = self.waiting.gives_way
        yielding = [running for running in self.running if not running.finished and gives_way(running, request)]
        held = self.pool.num_exclusive(*(running.block_table for running in yielding))
        if not yielding or self.pool.blocks_for(request.num_tokens + 1) > self.pool.num_free + held:
            return None
        victim = self.waiting.victim(yielding)
        self._preempt(victim, chunks)
        return victim

    def _admit_one_behind(self, first: Request, chunks: dict[Request, Chunk], now: float) -> bool:
        """Admit one of the next in the queue in place of the first, which lacks blocks; False if none fits."""
        for request in list(islice(self.waiting, 1, 1 + self._look_past - first.num_passed)):
            if self._try_to_admit(request, chunks, now) is None:
                first.num_passed += 1
                return True
        return False

    def _note_what_is_lacking(self, lacking: Lacking) -> None:
        """The first in the queue lacks it; those behind wait for the first."""
        first = next(iter(self.waiting))
        for request in self.waiting:
            overtaken = first.arrival_time > request.arrival_time
            request.waited.count("priority" if overtaken else lacking)

    def _budget_left(self, chunks: dict[Request, Chunk]) -> int:
        return self._token_budget - sum(chunk.num_tokens for chunk in chunks.values())

    def _start(self, request: Request, beginning: Beginning, count: int, now: float) -> None:
        """Give a request a seat, the blocks of its beginning, and those for `count` tokens after it."""
        self.running.append(request)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
        if self.cache is not None:
            self.cache.admit(request, beginning.blocks[: beginning.num_found])
        of_first = beginning.blocks[beginning.num_found :]
        self.pool.share(of_first)
        request.block_table.extend(of_first)
        request.num_computed = beginning.num_tokens
        blocks = self.pool.blocks_for(request.num_computed + count) - len(request.block_table)
        request.block_table.extend(self.pool.allocate(blocks))

    def _chunk_length(self, request: Request, num_computed: int, budget: int) -> int:
        needed = request.num_tokens - num_computed
        if not self._chunked_prefill and not request.block_table and budget < needed <= self._token_budget:
            return 0
        if request.scores_prompt and self._chunked_prefill:
            budget = min(budget, _MOST_SCORED_TOKENS)
        # A preempted sequence that has outgrown a whole step's budget comes back in chunks whatever the switch says.
        return max(0, min(needed, budget, self._longest_chunk or budget))

    def _chunk(self, request: Request, count: int) -> Chunk:
        start, end = request.num_computed, request.num_computed + count
        self.waiting.charge(request, count)
        return Chunk(request, request.token_ids[start:end], start, sample=end == request.num_tokens)

    def _grow(self, request: Request, count: int, chunks: dict[Request, Chunk], now: float) -> bool:
        """Give the request blocks for `count` more tokens, preempting others, or itself, if need be.

        False if the request itself lost its blocks, or ended because it is alone and still too long.
        """
        pool = self.pool
        missing = pool.blocks_for(request.num_computed + count) - len(request.block_table)
        while missing > pool.num_free:
            victim = self.waiting.victim(self.running)
            if victim is request and len(self.running) == 1:
                # Alone and still too long for the pool: it keeps what it has.
                request.finish(FINISH_LENGTH, now)
                return False
            self._preempt(victim, chunks)
            if victim is request:
                return False
        if missing > 0:
            request.block_table.extend(pool.allocate(missing))
        return True

    def _preempt(self, victim: Request, chunks: dict[Request, Chunk]) -> None:
        """Take its blocks and put it back into its place in the queue; what it had is computed again later."""
        chunk = chunks.pop(victim, None)
        if chunk is not None:
            self.waiting.charge(victim, -chunk.num_tokens)
        self._release(victim)
        self.running.remove(victim)
        victim.num_lost = max(victim.num_lost, victim.num_computed)
        victim.num_computed = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(victim)
        self._queued_tokens += victim.num_tokens


def make_queue(config: EngineConfig) -> QueueOrder:
    """The queue that the configuration asks for."""
    if config.queue_order == "priority":
        return Priority(config.aging_seconds)
    if config.queue_order == "fair":
        return Fair(config.weight_of_tenant)
    return Fcfs()
