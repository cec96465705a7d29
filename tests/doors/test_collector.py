"""Waiting for the engine's answers inside `execute`."""

from __future__ import annotations

import threading

import pytest

from slipstream.doors.collector import Collector
from slipstream.engine.messages import Output
from slipstream.errors import Unavailable

PATIENCE_S = 30.0


def never(awaited: set[int]) -> None:
    raise AssertionError(f"waited for {awaited}")


def test_answers_that_came_before_the_wait_are_returned_at_once() -> None:
    collector = Collector()
    collector.expect([1, 2])
    for id_ in (2, 1):
        collector.deliver(Output(id_, token_ids=[id_]))
    assert {id_: output.token_ids for id_, output in collector.wait(never, PATIENCE_S).items()} == {1: [1], 2: [2]}


def test_the_wait_ends_with_the_last_answer_from_another_thread() -> None:
    collector = Collector()
    collector.expect([1, 2])
    collector.deliver(Output(1))
    thread = threading.Thread(target=lambda: collector.deliver(Output(2)))
    thread.start()
    assert set(collector.wait(never, PATIENCE_S)) == {1, 2}
    thread.join()


def test_nothing_awaited_is_no_wait() -> None:
    collector = Collector()
    collector.expect([])
    assert collector.wait(never, PATIENCE_S) == {}


def test_answers_that_nobody_awaits_are_dropped() -> None:
    """Also a second one for the same id, and one that comes late from an earlier batch."""
    collector = Collector()
    collector.deliver(Output(7))
    collector.expect([1])
    collector.deliver(Output(1, token_ids=[1]))
    collector.deliver(Output(1, token_ids=[2]))
    collector.deliver(Output(0))
    assert {id_: output.token_ids for id_, output in collector.wait(never, PATIENCE_S).items()} == {1: [1]}


def test_while_it_waits_it_calls_with_what_is_still_missing() -> None:
    """The call may deliver, as a cancellation does that the engine answers."""
    collector = Collector()
    collector.expect([1, 2, 3])
    collector.deliver(Output(2))
    calls: list[set[int]] = []

    def answer_one(awaited: set[int]) -> None:
        calls.append(set(awaited))
        collector.deliver(Output(min(awaited)))

    assert set(collector.wait(answer_one, 0.001)) == {1, 2, 3}
    assert calls == [{1, 3}, {3}]


def test_a_failure_ends_the_wait_with_its_reason() -> None:
    collector = Collector()
    collector.expect([1, 2])
    collector.deliver(Output(1))
    collector.fail("the engine died")
    with pytest.raises(Unavailable, match="the engine died"):
        collector.wait(never, PATIENCE_S)


def test_a_failure_is_forgotten_with_the_next_batch() -> None:
    collector = Collector()
    collector.fail("the engine died while nobody waited")
    collector.expect([1])
    collector.deliver(Output(1))
    assert set(collector.wait(never, PATIENCE_S)) == {1}
