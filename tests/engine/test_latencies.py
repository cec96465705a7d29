"""How long requests waited for their tokens, as an engine counts it."""

from __future__ import annotations

from bisect import bisect_left

import pytest

from scripted import DOOR, ScriptedRunner, make_config, make_request
from slipstream.engine.engine import Engine
from slipstream.engine.latencies import END_TO_END_EDGES, FIRST_TOKEN_EDGES, INTER_TOKEN_EDGES, LatencyCounts


class SetClock:
    """Stands still until it is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def counted(counts: LatencyCounts, edges: tuple[float, ...]) -> dict[float, int]:
    """How many lie in the bucket up to each edge, where any do."""
    return {edge: count for edge, count in zip((*edges, float("inf")), counts.counts, strict=True) if count}


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def engine(clock: SetClock) -> Engine:
    return Engine(make_config(max_num_seqs=4), ScriptedRunner(20), clock)


def step_at(engine: Engine, clock: SetClock, *times: float) -> None:
    for now in times:
        clock.now = now
        engine.step()


def test_a_value_on_an_edge_lies_in_the_bucket_that_ends_there() -> None:
    counts = LatencyCounts.empty((0.1, 0.2))
    for seconds in (0.05, 0.1, 0.1000001, 0.2, 0.3, 5.0):
        counts.observe(seconds, (0.1, 0.2))
    assert counts.counts == [2, 2, 2]
    assert counts.sum_s == pytest.approx(5.7500001)


@pytest.mark.parametrize("edges", [FIRST_TOKEN_EDGES, INTER_TOKEN_EDGES, END_TO_END_EDGES])
def test_edges_rise_and_time_limits_are_among_them(edges: tuple[float, ...]) -> None:
    assert list(edges) == sorted(set(edges))
    limits = {FIRST_TOKEN_EDGES: (0.2, 0.5, 2.0), INTER_TOKEN_EDGES: (0.03, 0.2), END_TO_END_EDGES: (2.0,)}[edges]
    assert all(edges[bisect_left(edges, limit)] == limit for limit in limits)


def test_each_token_counts_from_the_one_before_and_the_first_from_the_arrival(engine: Engine, clock: SetClock) -> None:
    engine.add(make_request(0, 5, 3, ignore_eos=True))
    step_at(engine, clock, 0.3, 0.34, 2.34)
    stats = engine.stats()
    assert counted(stats.first_token, FIRST_TOKEN_EDGES) == {0.5: 1}
    assert counted(stats.inter_token, INTER_TOKEN_EDGES) == {0.05: 1, 2.5: 1}
    assert counted(stats.end_to_end, END_TO_END_EDGES) == {2.5: 1}
    assert (stats.first_token.sum_s, stats.end_to_end.sum_s) == (pytest.approx(0.3), pytest.approx(2.34))
    assert stats.inter_token.sum_s == pytest.approx(0.04 + 2.0)


def test_a_cancelled_request_has_no_end_to_end_latency(engine: Engine, clock: SetClock) -> None:
    engine.add(make_request(0, 5, 9, ignore_eos=True))
    step_at(engine, clock, 0.1, 0.2)
    engine.abort([(DOOR, 0)])
    stats = engine.stats()
    assert sum(stats.first_token.counts) == sum(stats.inter_token.counts) == 1
    assert counted(stats.end_to_end, END_TO_END_EDGES) == {}


def test_each_choice_of_a_request_has_tokens_of_its_own(engine: Engine, clock: SetClock) -> None:
    engine.add(make_request(0, 5, 4, n=3, ignore_eos=True))
    step_at(engine, clock, *(0.1 * number for number in range(1, 12)))
    stats = engine.stats()
    assert sum(stats.first_token.counts) == sum(stats.end_to_end.counts) == 3
    assert sum(stats.inter_token.counts) == 3 * (4 - 1) == stats.generation_tokens - 3


def test_rows_that_go_on_in_a_lock_step_batch_count_no_more_tokens(clock: SetClock) -> None:
    engine = Engine(make_config(policy="lockstep", max_num_seqs=2), ScriptedRunner(20), clock)
    engine.add(make_request(0, 5, 2, ignore_eos=True))
    engine.add(make_request(1, 5, 4, ignore_eos=True))
    step_at(engine, clock, 1.0, 2.0, 3.0, 4.0)
    stats = engine.stats()
    assert counted(stats.first_token, FIRST_TOKEN_EDGES) == {1.0: 2}
    assert counted(stats.inter_token, INTER_TOKEN_EDGES) == {1.0: 1 + 3}
    assert counted(stats.end_to_end, END_TO_END_EDGES) == {2.0: 1, 5.0: 1}
