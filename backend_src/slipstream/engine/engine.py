"""The engine: a scheduler, a runner and the step that joins them. It runs in a process of its own, or inside a test."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from slipstream.batchers.iterative import IterativeScheduler
from slipstream.batchers.lockstep import LockstepScheduler
from slipstream.config import EngineConfig
from slipstream.engine.batch import Batch, StepOutput
from slipstream.engine.block_pool import BlockPool
from slipstream.engine.latencies import END_TO_END_EDGES, FIRST_TOKEN_EDGES, INTER_TOKEN_EDGES
from slipstream.engine.messages import EngineStats
from slipstream.engine.policy import BatchingPolicy
from slipstream.engine.records import StepRecord, StepRecords
from slipstream.engine.request import FINISH_CANCELLED, FINISH_ERROR, INTERNAL, Request
from slipstream.engine.scheduler import ContinuousScheduler
from slipstream.errors import InvalidRequest, OutOfMemory
from slipstream.models.runner import Runner

log = logging.getLogger(__name__)

# So many steps in a row that compute nothing and end nothing, though there is work, are a deadlock.
_STEPS_UNTIL_STUCK = 100


class Engine:
    """Takes requests in, computes step by step, and says which requests changed."""

    def __init__(self, config: EngineConfig, runner: Runner, clock: Callable[[], float] = time.monotonic) -> None:
        self.runner = runner
        self.records = StepRecords()
        self.requests: dict[tuple[bytes, int], Request] = {}
        self.scheduler = _make_scheduler(config, runner)
        self._clock = clock
        self._stats = EngineStats(kv_blocks_total=runner.num_blocks)
        self.num_finished: Counter[str] = Counter()
        self.num_refused: Counter[str] = Counter()  # counted by who answers them
        self._blocks_peak = 0
        self._steps_without_progress = 0
        self._least_without_memory = math.inf

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Take in a request, with all its choices: the further ones of n > 1 have the keys after its own.

        Raises:
            InvalidRequest: it can never be computed.
            Unavailable: the queue is full.
        """
        choices = [request, *(request.fork(choice) for choice in range(1, request.sampling.n))]
        for choice in choices:
            if choice.key in self.requests:
                raise InvalidRequest(f"request {choice.key[1]} is still running")
        if request.num_tokens == 0:
            raise InvalidRequest("the prompt has no tokens")
        if request.max_total_tokens > self.runner.max_model_len:
            raise InvalidRequest(
                f"the prompt has {request.num_prompt_tokens} tokens and max_tokens is {request.sampling.max_tokens}; "
                f"together at most {self.runner.max_model_len} are allowed"
            )
        for choice in choices:
            choice.know_end_of_sequence(self.runner.eos_token_ids)
        self.scheduler.add(request, choices[1:])
        self.requests.update((choice.key, choice) for choice in choices)
        self._stats.prompt_tokens += request.num_prompt_tokens  # all choices have one prompt

    def abort(
        self,
        keys: Iterable[tuple[bytes, int]],
        reason: str = FINISH_CANCELLED,
        error: str | None = None,
        error_kind: str = INTERNAL,
    ) -> list[Request]:
        """End requests, wherever they are; keys that are unknown have ended already. Returns those that it ended."""
        ended = []
        for key in keys:
            request = self.requests.get(key)
            if request is not None:
                self.scheduler.abort(request, self._clock(), reason, error)
                request.error_kind = error_kind
                self._forget(request)
                ended.append(request)
        self._check_when_idle()
        return ended

    def step(self) -> list[Request]:
        """Compute one step; returns the requests that got a token or ended, the ended ones for the last time."""
        scheduler = self.scheduler
        start = self._clock()
        batch = scheduler.schedule(start)
        record = self._open_record(batch, start)
        try:
            output = self._compute(batch)
        except Exception as error:
            log.exception("a step failed; its requests are ended")
            keys = [chunk.request.key for chunk in batch.chunks if not chunk.request.finished]
            ended = self.abort(keys, FINISH_ERROR, f"the step that computed it failed: {type(error).__name__}: {error}")
            ended += self._update(Batch(), [], self._clock())
            self._check_when_idle()
            return ended
        computed = self._clock()
        sampled = [
            chunk.request
            for chunk, token_id in zip(batch.sampled, output.token_ids, strict=True)
            if token_id >= 0 and not chunk.request.finished
        ]
        record.sampled_rows = len(sampled)
        self._note_waits(sampled, computed)
        _keep_logprobs(output)
        changed = self._update(batch, output.token_ids, computed)
        changed += self._end_what_is_stuck(progress=bool(batch.chunks or changed))
        self._check_when_idle()
        record.run_s = computed - record.start_s - record.schedule_s
        record.update_s = self._clock() - computed
        record.left = len(self.requests)
        self._close_record(record)
        return changed

    def stats(self) -> EngineStats:
        """Gauges and counters; the high-water mark of blocks starts anew with each call."""
        stats, scheduler = self._stats, self.scheduler
        stats.running, stats.waiting = scheduler.num_running, scheduler.num_waiting
        stats.kv_blocks_used = scheduler.pool.num_used
        stats.kv_blocks_peak = max(self._blocks_peak, stats.kv_blocks_used)
        stats.kv_blocks_cached = scheduler.pool.num_kept
        stats.preemptions = scheduler.num_preemptions
        if scheduler.cache is not None:
            stats.prefix_queried_tokens = scheduler.cache.queried_tokens
            stats.prefix_hit_tokens = scheduler.cache.hit_tokens
            stats.readmission_queried_tokens = scheduler.cache.readmission_queried_tokens
            stats.readmission_hit_tokens = scheduler.cache.readmission_hit_tokens
        stats.finished = dict(self.num_finished)
        stats.refused = dict(self.num_refused)
        self._blocks_peak = 0
        return stats

    def status(self) -> dict[str, Any]:
        """What the control socket tells of now; `clock_s` is the time that records and requests are noted in."""
        scheduler, runner = self.scheduler, self.runner
        return {
            "clock_s": self._clock(),
            "steps": self._stats.steps,
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "finished": dict(self.num_finished),
            "kv_blocks_used": scheduler.pool.num_used,
            "kv_blocks_total": scheduler.pool.num_blocks,
            "block_size": scheduler.pool.block_size,
            "max_model_len": runner.max_model_len,
            "device": runner.device_name,
            "batch_invariant": runner.batch_invariant,
        }

    def _update(self, batch: Batch, token_ids: list[int], now: float) -> list[Request]:
        """Let the scheduler take in a step; what has ended with it, or before it, is known no more."""
        changed = self.scheduler.update(batch, token_ids, now)
        for request in changed:
            if request.finished:
                self._forget(request)
        return changed

    def _compute(self, batch: Batch) -> StepOutput:
        if batch.copies:
            self.runner.copy_blocks(batch.copies)
        return self._run(batch) if batch.chunks else StepOutput()

    def _run(self, batch: Batch) -> StepOutput:
        """Run a batch; where memory is short in two halves, and those again, and from then on with smaller steps."""
        try:
            return self.runner.run(batch)
        except OutOfMemory as error:
            if batch.num_tokens == 1:
                raise
            if batch.num_tokens < self._least_without_memory:  # not again in every step, where no budget is that small
                self._least_without_memory = batch.num_tokens
                log.warning("no memory for a step of %d tokens, trying half of it: %s", batch.num_tokens, error)
        self.scheduler.shrink_budget(batch.num_tokens // 2)
        first, rest = batch.split()
        return self._run(first) + self._run(rest)

    def _end_what_is_stuck(self, progress: bool) -> list[Request]:
        """The watchdog: a scheduler that makes no progress loses the request that it is stuck at, and goes on."""
        self._steps_without_progress = 0 if progress else self._steps_without_progress + 1
        if self._steps_without_progress < _STEPS_UNTIL_STUCK:
            return []
        self._steps_without_progress = 0
        request = self.scheduler.stuck
        if request is None:
            return []
        log.error("no progress in %d steps; request %s is ended. %s", _STEPS_UNTIL_STUCK, request.key, self._state())
        error = f"the scheduler made no progress in {_STEPS_UNTIL_STUCK} steps with this request (see the engine's log)"
        return self.abort([request.key], FINISH_ERROR, error)

    def _state(self) -> str:
        """What a deadlock is explained from."""

        def listed(requests: Iterable[Request]) -> str:
            each = (
                f"{r.key[1]} ({r.num_computed}/{r.num_tokens} tokens, {len(r.block_table)} blocks)" for r in requests
            )
            return ", ".join(each) or "none"

        scheduler, pool = self.scheduler, self.scheduler.pool
        return (
            f"running: {listed(scheduler.running)}; waiting: {listed(scheduler.waiting)}; "
            f"{pool.num_free} of {pool.num_blocks} blocks are free"
        )

    def _check_when_idle(self) -> None:
        """Assert the scheduler's invariants where that delays nobody."""
        if not self.requests:
            self.scheduler.check()

    def _note_waits(self, sampled: list[Request], now: float) -> None:
        """Count how long these waited for the token that they get now."""
        stats = self._stats
        for request in sampled:
            if request.last_token_time is None:
                stats.first_token.observe(now - request.arrival_time, FIRST_TOKEN_EDGES)
            else:
                stats.inter_token.observe(now - request.last_token_time, INTER_TOKEN_EDGES)

    def _forget(self, request: Request) -> None:
        del self.requests[request.key]
        assert request.finish_reason is not None
        assert request.finish_time is not None
        self.num_finished[request.finish_reason] += 1
        if request.finish_reason not in (FINISH_CANCELLED, FINISH_ERROR):
            self._stats.end_to_end.observe(request.finish_time - request.arrival_time, END_TO_END_EDGES)

    def _open_record(self, batch: Batch, start: float) -> StepRecord:
        scheduler = self.scheduler
        decode_rows = sum(chunk.is_decode and not chunk.request.finished for chunk in batch.chunks)
        recomputed_rows = sum(chunk.num_recomputed for chunk in batch.chunks if chunk.request.num_lost)
        useful_rows = batch.num_useful_tokens
        return StepRecord(
            index=self._stats.steps,
            start_s=start,
            prefill_rows=useful_rows - decode_rows - recomputed_rows,
            decode_rows=decode_rows,
            recomputed_rows=recomputed_rows,
            prompt_padding_rows=batch.num_prompt_padding,
            finished_rows=batch.num_finished_rows,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            preemptions=scheduler.num_preemptions,
            kv_blocks_used=scheduler.pool.num_used,
            kv_tokens_held=scheduler.num_held_tokens + useful_rows,
            schedule_s=self._clock() - start,
        )

    def _close_record(self, record: StepRecord) -> None:
        stats = self._stats
        stats.steps += 1
        stats.generation_tokens += record.sampled_rows
        useful = record.prefill_rows + record.decode_rows
        stats.useful_tokens += useful
        stats.computed_tokens += useful + record.recomputed_rows + record.prompt_padding_rows + record.finished_rows
        reserved = record.kv_blocks_used * self.scheduler.pool.block_size
        if reserved:
            stats.kv_waste_steps += 1 - record.kv_tokens_held / reserved
        self._blocks_peak = max(self._blocks_peak, record.kv_blocks_used)
        self.records.append(record)


def _keep_logprobs(output: StepOutput) -> None:
    for chunk, scores in output.prompt_logprobs:
        # What a preempted request has computed before is computed again.
        chunk.request.prompt_logprobs[chunk.start : chunk.start + len(scores)] = scores
    for request, scored in output.logprobs:
        if not request.finished:
            request.logprobs.append(scored)


def _make_scheduler(config: EngineConfig, runner: Runner) -> BatchingPolicy:
    pool = BlockPool(runner.num_blocks, config.block_size)
    if config.policy == "lockstep":
        return LockstepScheduler(config, pool)
    if config.policy == "iterative":
        return IterativeScheduler(config, pool)
    return ContinuousScheduler(config, pool, runner.token_budget)
