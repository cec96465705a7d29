"""The iterative policy computes exactly the sequences that each call names, one token each."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observed import ObservedEngine
from scripted import BLOCK_SIZE, DOOR, ScriptedRunner, make_config, make_request
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
    call: int
    prompt: int
    max_tokens: int


@dataclass(frozen=True)
class Scenario:
    num_blocks: int
    seats: int
    arrivals: list[Arrival]
    absent: list[tuple[int, int]] = field(default_factory=list)  # (call, request) that this call does not name
    cancels: list[tuple[int, int]] = field(default_factory=list)  # (call, request)
    failing_steps: frozenset[int] = frozenset()
    not_finite: frozenset[tuple[int, int]] = frozenset()


arrivals = st.builds(Arrival, call=st.integers(0, 40), prompt=st.integers(1, 40), max_tokens=st.integers(1, 40))
pairs = st.tuples(st.integers(0, 60), st.integers(0, 9))
scenarios = st.builds(
    Scenario,
    num_blocks=st.integers(4, 40),
    seats=st.integers(1, 6),
    arrivals=st.lists(arrivals, min_size=1, max_size=10),
    absent=st.lists(pairs, max_size=30),
    cancels=st.lists(pairs, max_size=6),
    failing_steps=st.frozensets(st.integers(0, 60), max_size=2),
    not_finite=st.frozensets(st.tuples(st.integers(0, 9), st.integers(0, 20)), max_size=3),
)


def play(scenario: Scenario) -> ObservedEngine:
    """Call after call until every sequence has ended."""
    runner = ScriptedRunner(
        scenario.num_blocks,
        failing_steps=scenario.failing_steps,
        not_finite={((DOOR, request), index) for request, index in scenario.not_finite},
    )
    observed = ObservedEngine(make_config(policy="iterative", max_num_seqs=scenario.seats), runner)
    pending = sorted(enumerate(scenario.arrivals), key=lambda item: item[1].call)
    call = 0
    while pending or observed.engine.requests:
        named = [
            request for request in observed.engine.requests.values() if (call, request.key[1]) not in scenario.absent
        ]
        for request in named:
            observed.scheduler.advance(request)
        while pending and pending[0][1].call <= call:
            number, arrival = pending.pop(0)
            request = make_request(number, arrival.prompt, arrival.max_tokens, seed=number)
            refusal = observed.add(request)
            fits = arrival.prompt + arrival.max_tokens <= scenario.num_blocks * BLOCK_SIZE
            assert isinstance(refusal, InvalidRequest) == (not fits)
            if refusal is None:
                named.append(request)
        observed.cancel(*[number for at, number in scenario.cancels if at == call])
        named = [request for request in named if not request.finished]
        assert observed.engine.has_work == bool(named)
        if named:
            check_call(observed, scenario, named)
        assert call < 2000, "the engine does not come to an end"
        call += 1
    observed.check_end()
    return observed


def check_call(observed: ObservedEngine, scenario: Scenario, named: list[Request]) -> None:
    """One step: the named get one token each, or nothing for want of room; nobody else is touched."""
    before = {key: len(output) for key, output in observed.delivered.items()}
    batches = len(observed.runner.batches)
    waiting = [request for request in observed.scheduler.waiting if request in named]
    changed = observed.step()
    assert set(changed) == set(named), "not exactly the named were answered"
    failed = len(observed.runner.batches) > batches and batches in scenario.failing_steps
    for request in named:
        grown = len(observed.delivered[request.key]) - before[request.key]
        assert grown == 1 or failed or request.finish_reason == "error" or request in observed.scheduler.waiting
    for request in observed.scheduler.waiting:
        assert request.block_table == []
        if request in named:
            assert request in waiting
            assert request.waited.seats + request.waited.blocks > 0
    assert len(observed.scheduler.running) <= scenario.seats
    for request in observed.scheduler.running:
        assert len(request.block_table) == observed.scheduler.pool.blocks_for(request.max_total_tokens)
    assert not observed.engine.has_work, "a sequence is computed without being named"


@settings(max_examples=200)
@given(scenarios)
def test_a_call_advances_exactly_the_sequences_it_names(scenario: Scenario) -> None:
    observed = play(scenario)
    assert observed.engine.stats().preemptions == 0
    assert observed.engine.stats().computed_tokens == observed.engine.stats().useful_tokens


def test_a_sequence_without_room_waits_until_another_has_ended() -> None:
    observed = ObservedEngine(make_config(policy="iterative", max_num_seqs=1), ScriptedRunner(8))
    first, second = make_request(0, 3, 2, ignore_eos=True), make_request(1, 3, 1, ignore_eos=True)
    observed.add(first)
    observed.add(second)
    observed.step()
    assert (len(observed.delivered[first.key]), len(observed.delivered[second.key])) == (1, 0)
    assert second.waited.seats == 1
    observed.scheduler.advance(first)
    observed.step()
    observed.scheduler.advance(second)
    observed.step()
    assert observed.reasons == {first.key: "length", second.key: "length"}
    observed.check_end()


def test_a_sequence_that_needs_many_blocks_is_not_overtaken() -> None:
    observed = ObservedEngine(make_config(policy="iterative"), ScriptedRunner(8))
    half, whole = 4 * BLOCK_SIZE - 3, 8 * BLOCK_SIZE - 3
    first, large, later = (make_request(n, length, 3, ignore_eos=True) for n, length in enumerate((half, whole, half)))
    for request in (first, large, later):
        observed.add(request)
    started: list[Request] = []
    while observed.engine.requests:
        for request in observed.engine.requests.values():
            observed.scheduler.advance(request)
        observed.step()
        started += [request for request in observed.scheduler.running if request not in started]
    assert started == [first, large, later], "the half that is free is not for the last one"
    assert (large.waited.blocks, later.waited.blocks) == (3, 6)


def test_a_sequence_that_nobody_names_keeps_its_place() -> None:
    observed = ObservedEngine(make_config(policy="iterative"), ScriptedRunner(8))
    request = make_request(0, 3, 3, ignore_eos=True)
    observed.add(request)
    observed.step()
    assert not observed.engine.has_work
    assert observed.engine.stats().running == 1
    observed.cancel(0)
    observed.check_end()
