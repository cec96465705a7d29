"""Static batching costs exactly what its definition says, and gives every row its own answer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observed import ObservedEngine
from scripted import BLOCK_SIZE, DOOR, ScriptedRunner, expected_output, make_config, make_request
from slipstream.engine.batch import Batch
from slipstream.engine.request import Request
from slipstream.errors import InvalidRequest


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """The engine logs every failed step with its traceback; here hundreds fail on purpose."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: int
    max_tokens: int
    stop_length: int = 0


@dataclass(frozen=True)
class Scenario:
    num_blocks: int
    seats: int
    arrivals: list[Arrival]
    cancels: list[tuple[int, int]] = field(default_factory=list)  # (step, request)
    failing_steps: frozenset[int] = frozenset()
    not_finite: frozenset[tuple[int, int]] = frozenset()  # (request, output index)


arrivals = st.builds(
    Arrival,
    step=st.integers(0, 60),
    prompt=st.integers(1, 40),
    max_tokens=st.integers(1, 40),
    stop_length=st.one_of(st.just(0), st.integers(1, 40)),
)
scenarios = st.builds(
    Scenario,
    num_blocks=st.integers(4, 60),
    seats=st.integers(1, 6),
    arrivals=st.lists(arrivals, min_size=1, max_size=12),
)
troubled_scenarios = st.builds(
    Scenario,
    num_blocks=st.integers(4, 60),
    seats=st.integers(1, 6),
    arrivals=st.lists(arrivals, min_size=1, max_size=12),
    cancels=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 11)), max_size=8),
    failing_steps=st.frozensets(st.integers(0, 60), max_size=3),
    not_finite=st.frozensets(st.tuples(st.integers(0, 11), st.integers(0, 20)), max_size=4),
)


class ObservedLockstep:
    """Checks each group as it is formed and each step of it, and keeps the groups."""

    def __init__(self, observed: ObservedEngine, scenario: Scenario) -> None:
        self.groups: list[list[Request]] = []
        self._scheduler = observed.scheduler
        self._scenario = scenario
        self._schedule = observed.scheduler.schedule
        observed.scheduler.schedule = self.schedule

    def schedule(self, now: float) -> Batch:
        scheduler = self._scheduler
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        batch = self._schedule(now)
        rows = scheduler.running
        assert [chunk.request for chunk in batch.chunks] == rows, "not every row is computed in every step"
        assert all(chunk.sample for chunk in batch.chunks)
        if running:
            assert rows == running, "a group has changed"
            assert batch.num_tokens == len(rows)
            assert batch.num_finished_rows == sum(row.finished for row in rows)
            return batch
        self.groups.append(list(rows))
        assert rows == waiting[: len(rows)], "the queue was jumped"
        longest = max(row.num_prompt_tokens for row in rows)
        assert batch.num_tokens == longest * len(rows)
        assert batch.num_useful_tokens == sum(row.num_prompt_tokens for row in rows)
        blocks = blocks_of_each(rows)
        assert all(len(row.block_table) == blocks for row in rows)
        assert all(row.padding == longest - row.num_prompt_tokens for row in rows)
        larger = waiting[: len(rows) + 1]
        if len(larger) > len(rows):
            is_full = len(larger) > self._scenario.seats
            assert is_full or blocks_of_each(larger) * len(larger) > self._scenario.num_blocks, "a row was left out"
        return batch


def blocks_of_each(rows: list[Request]) -> int:
    """KV blocks of each row of a lock-step batch: the longest prompt plus the longest answer that may come."""
    longest = max(row.num_prompt_tokens for row in rows) + max(row.sampling.max_tokens for row in rows)
    return -(-longest // BLOCK_SIZE)


def play(scenario: Scenario) -> tuple[ObservedEngine, list[list[Request]]]:
    """Run a scenario to its end under observation; returns the groups that were formed."""
    runner = ScriptedRunner(
        scenario.num_blocks,
        failing_steps=scenario.failing_steps,
        not_finite={((DOOR, request), index) for request, index in scenario.not_finite},
    )
    observed = ObservedEngine(make_config(policy="lockstep", max_num_seqs=scenario.seats), runner)
    watch = ObservedLockstep(observed, scenario)
    pending = sorted(enumerate(scenario.arrivals), key=lambda item: item[1].step)
    step = 0
    while pending or observed.engine.has_work:
        while pending and pending[0][1].step <= step:
            number, arrival = pending.pop(0)
            request = make_request(
                number, arrival.prompt, arrival.max_tokens, stop_length=arrival.stop_length, seed=number
            )
            refusal = observed.add(request)
            fits = arrival.prompt + arrival.max_tokens <= scenario.num_blocks * BLOCK_SIZE
            assert isinstance(refusal, InvalidRequest) == (not fits)
        observed.cancel(*[number for at, number in scenario.cancels if at == step])
        if observed.engine.has_work:
            observed.step()
        assert step < 2000, "the engine does not come to an end"
        step += 1
    observed.check_end()
    return observed, watch.groups


@settings(max_examples=150)
@given(scenarios)
def test_padding_is_counted_exactly(scenario: Scenario) -> None:
    """Computed = rows x steps with prompts padded to the longest; useful = the rows' own tokens."""
    observed, groups = play(scenario)
    computed = useful = steps = 0
    for group in groups:
        lengths = [len(expected_output(row.token_ids[: row.num_prompt_tokens], row.sampling)[0]) for row in group]
        computed += len(group) * (max(row.num_prompt_tokens for row in group) + max(lengths) - 1)
        useful += sum(row.num_prompt_tokens + length - 1 for row, length in zip(group, lengths, strict=True))
        steps += max(lengths)
    stats = observed.engine.stats()
    assert (stats.computed_tokens, stats.useful_tokens, stats.steps) == (computed, useful, steps)
    assert stats.preemptions == 0


@settings(max_examples=150)
@given(troubled_scenarios)
def test_cancels_failed_steps_and_broken_logits_take_nobody_else_with_them(scenario: Scenario) -> None:
    observed, _ = play(scenario)
    failed_steps = [step for step in scenario.failing_steps if step < len(observed.runner.batches)]
    hit = {chunk.request.key for step in failed_steps for chunk in observed.runner.batches[step].chunks}
    for key, reason in observed.reasons.items():
        if reason == "error":
            assert key in hit or (key[1], len(observed.delivered[key])) in scenario.not_finite
        if reason == "cancelled":
            assert any(number == key[1] for _, number in scenario.cancels)


def test_each_row_stops_at_its_own_end_and_the_batch_at_the_last() -> None:
    """DYN-03, DYN-07: rows of one batch differ in max_tokens and stop length; the short ones wait but are trimmed."""
    observed = ObservedEngine(make_config(policy="lockstep"), ScriptedRunner(64))
    for number, (prompt, fields) in enumerate(
        [(3, {"max_tokens": 1}), (20, {"max_tokens": 64}), (9, {"max_tokens": 64, "stop_length": 5})]
    ):
        observed.add(make_request(number, prompt, ignore_eos=True, **fields))
    observed.step()
    assert observed.reasons == {(DOOR, 0): "length"}
    observed.run()
    assert {key[1]: (len(ids), observed.reasons[key]) for key, ids in observed.delivered.items()} == {
        0: (1, "length"),
        1: (64, "length"),
        2: (5, "stop"),
    }
    observed.check_end()


def test_a_cancelled_row_leaves_the_batch_running_and_its_blocks_come_back_with_it() -> None:
    observed = ObservedEngine(make_config(policy="lockstep"), ScriptedRunner(64))
    observed.add(make_request(0, 4, 6, ignore_eos=True))
    observed.add(make_request(1, 4, 3, ignore_eos=True))
    observed.step()
    observed.cancel(0)
    changed = observed.step()
    assert [request.key for request in changed] == [(DOOR, 1)]
    assert observed.records[-1]["finished_rows"] == 1
    observed.run()
    assert len(observed.records) == 3, "the batch went on for a row that nobody waits for"
    observed.check_end()


def test_a_batch_whose_rows_are_all_cancelled_ends_at_once() -> None:
    observed = ObservedEngine(make_config(policy="lockstep"), ScriptedRunner(64))
    for number in (0, 1):
        observed.add(make_request(number, 4, 6, ignore_eos=True))
    observed.step()
    observed.cancel(0, 1)
    assert not observed.engine.has_work
    observed.check_end()


def test_rows_that_go_on_after_their_end_stay_within_their_reservation() -> None:
    """A long prompt with a short answer is computed on beside a short prompt with a long answer, to the last slot."""
    observed = ObservedEngine(make_config(policy="lockstep"), ScriptedRunner(20))
    observed.add(make_request(0, 40, 1, ignore_eos=True))
    observed.add(make_request(1, 2, 40, ignore_eos=True))
    observed.run()
    observed.check_end()
    assert {key[1]: len(ids) for key, ids in observed.delivered.items()} == {0: 1, 1: 40}
    assert [record["prompt_padding_rows"] for record in observed.records] == [38] + [0] * 39
    assert [record["finished_rows"] for record in observed.records] == [0] + [1] * 39
