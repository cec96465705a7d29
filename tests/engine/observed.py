"""An engine under observation: after every call the promises that hold for any policy are asserted."""

from __future__ import annotations

import math
from typing import Any

from scripted import DOOR, Clock, ScriptedRunner, expected_output, output_of, scripted_logprobs
from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.request import FINISH_CANCELLED, FINISH_ERROR, FINISH_LENGTH, FINISH_TIMEOUT, Request
from slipstream.errors import SlipstreamError

Key = tuple[bytes, int]
# Of `EngineStats`: what a metrics endpoint publishes as counters.
_COUNTERS = (
    "prompt_tokens",
    "generation_tokens",
    "preemptions",
    "prefix_queried_tokens",
    "prefix_hit_tokens",
    "readmission_queried_tokens",
    "readmission_hit_tokens",
    "steps",
    "useful_tokens",
    "computed_tokens",
    "kv_waste_steps",
)

# Of a step record: every row put through the model is of one of these kinds.
ROWS = ("prefill_rows", "decode_rows", "recomputed_rows", "prompt_padding_rows", "finished_rows")


class ObservedEngine:
    """Drives an engine as its process does, and keeps the books of what a client would have been told."""

    def __init__(self, config: EngineConfig, runner: ScriptedRunner) -> None:
        self.runner = runner
        self.engine = Engine(config, runner, Clock())
        self.scheduler: Any = self.engine.scheduler
        self.requests: dict[Key, Request] = {}  # all that were accepted
        self.delivered: dict[Key, list[int]] = {}
        self.reasons: dict[Key, str] = {}
        self.records: list[dict[str, Any]] = []
        self._counted: dict[str, float] = {}

    def add(self, request: Request) -> SlipstreamError | None:
        """Submit a request; the refusal, if it is one, must leave nothing behind."""
        scheduler = self.scheduler
        before = (scheduler.num_waiting, scheduler.num_running, scheduler.pool.num_used)
        try:
            self.engine.add(request)
        except SlipstreamError as refusal:
            assert request.key not in self.engine.requests
            assert (scheduler.num_waiting, scheduler.num_running, scheduler.pool.num_used) == before
            assert not request.finished
            return refusal
        door, number = request.key
        for choice in range(request.sampling.n):
            key = (door, number + choice)
            self.requests[key] = self.engine.requests[key]
            self.delivered[key] = []
        return None

    def cancel(self, *numbers: int) -> None:
        """Cancel requests by number; those that have ended already are left alone."""
        keys = [(DOOR, number) for number in numbers]
        alive = [key for key in dict.fromkeys(keys) if key in self.requests and key not in self.reasons]
        ended = self.engine.abort(keys)
        assert [request.key for request in ended] == alive
        self._deliver(ended)
        assert all(self.reasons[key] == FINISH_CANCELLED for key in alive)
        self.check()

    def step(self) -> list[Request]:
        """One step; returns the requests that changed."""
        steps = self.engine.stats().steps
        changed = self.engine.step()
        self._deliver(changed)
        if self.engine.stats().steps > steps:
            self.records += self.engine.records.last(1)
        self.check()
        return changed

    def run(self, most_steps: int = 10_000) -> None:
        """Step until nothing is left."""
        while self.engine.has_work:
            assert most_steps > 0, "the engine does not come to an end"
            most_steps -= 1
            self.step()

    def check(self) -> None:
        """What holds between any two calls."""
        self.scheduler.check()
        self._check_what_is_counted()
        assert set(self.engine.requests) == set(self.requests) - set(self.reasons)
        for key, request in self.requests.items():
            assert output_of(request) == self.delivered[key], "a token came without being reported"
            wanted = [scripted_logprobs(token_id) for token_id in request.output_ids]
            assert request.logprobs == (wanted if request.sampling.logprobs is not None else [])

    def check_end(self) -> None:
        """What holds once everything has ended: all was delivered, nothing is held, the books agree."""
        assert set(self.reasons) == set(self.requests)
        assert self.scheduler.pool.num_free == self.runner.num_blocks
        assert not any(request.block_table for request in self.requests.values())
        for key in self.requests:
            self._check_output(key)
        self._check_books()

    def _deliver(self, changed: list[Request]) -> None:
        assert len({request.key for request in changed}) == len(changed)
        for request in changed:
            key, output = request.key, output_of(request)
            assert key not in self.reasons, f"{key} changed after it had ended"
            known = self.delivered[key]
            assert output[: len(known)] == known, "what was delivered has changed"
            assert len(output) <= len(known) + 1
            self.delivered[key] = output
            if request.finish_reason is not None:
                self.reasons[key] = request.finish_reason
            assert (request.error is not None) == (request.finish_reason == FINISH_ERROR)

    def _check_output(self, key: Key) -> None:
        request, reason, output = self.requests[key], self.reasons[key], self.delivered[key]
        prompt_ids = request.token_ids[: request.num_prompt_tokens]
        expected, expected_reason = expected_output(prompt_ids, request.sampling, choice=request.choice)
        if request.sampling.prompt_logprobs is not None and request.choice == 0 and output:
            assert request.prompt_logprobs == [scripted_logprobs(token_id) for token_id in prompt_ids[1:]]
        if reason in (FINISH_CANCELLED, FINISH_ERROR, FINISH_TIMEOUT):
            assert output == expected[: len(output)]
        elif reason == FINISH_LENGTH and len(output) < len(expected):
            # Only a sequence for which the whole pool is too small may end early.
            assert output == expected[: len(output)]
            assert request.num_tokens == self.runner.num_blocks * self.scheduler.pool.block_size + 1
        else:
            assert (output, reason) == (expected, expected_reason)

    def _check_what_is_counted(self) -> None:
        """No counter ever falls, which metrics could not say; and nobody has more from the cache than a prompt has."""
        stats = self.engine.stats()
        counted = {name: getattr(stats, name) for name in _COUNTERS} | stats.finished
        fallen = {name: (before, counted[name]) for name, before in self._counted.items() if counted[name] < before}
        assert not fallen
        self._counted = counted
        assert stats.prefix_hit_tokens <= stats.prefix_queried_tokens
        assert stats.readmission_hit_tokens <= stats.readmission_queried_tokens
        for request in self.requests.values():
            assert 0 <= request.num_cached < request.num_prompt_tokens

    def _check_books(self) -> None:
        stats, records = self.engine.stats(), self.records

        def total(*names: str) -> int:
            return sum(record[name] for record in records for name in names)

        block_size = self.scheduler.pool.block_size
        assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
        assert stats.steps == len(records)
        assert [record["index"] for record in records] == list(range(len(records)))
        assert stats.prompt_tokens == sum(
            request.num_prompt_tokens for request in self.requests.values() if request.choice == 0
        )
        assert stats.generation_tokens == total("sampled_rows") == sum(map(len, self.delivered.values()))
        assert sum(stats.first_token.counts) == sum(bool(delivered) for delivered in self.delivered.values())
        assert sum(stats.inter_token.counts) == stats.generation_tokens - sum(stats.first_token.counts)
        assert stats.useful_tokens == total("prefill_rows", "decode_rows")
        assert stats.computed_tokens == total(*ROWS) == self.runner.num_rows
        waste = (
            1 - record["kv_tokens_held"] / (record["kv_blocks_used"] * block_size)
            for record in records
            if record["kv_blocks_used"]
        )
        assert math.isclose(stats.kv_waste_steps, sum(waste), abs_tol=1e-9)
        assert stats.preemptions == sum(request.num_preemptions for request in self.requests.values())
        assert stats.finished == {reason: list(self.reasons.values()).count(reason) for reason in self.reasons.values()}
        for record in records:
            assert record["preemptions"] or not record["recomputed_rows"]
            assert record["kv_tokens_held"] <= record["kv_blocks_used"] * block_size
            assert record["kv_blocks_used"] <= self.runner.num_blocks
