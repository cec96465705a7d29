"""The request timeline: who waited, who was served, who was held for a batch."""

from __future__ import annotations

import pytest

from simulated_comparison import comparison, fail
from slipstream_client.report.timeline import Timeline, ticks, timeline


def strips(batcher: str, concurrency: int) -> Timeline:
    results, requests = comparison((batcher,), (concurrency,), count=64)
    return timeline(results["runs"], requests)


def test_the_timeline_shows_the_first_requests_on_one_axis() -> None:
    results, requests = comparison(("dynamic", "continuous"), (16,), count=64)
    drawn = timeline(results["runs"], requests)
    assert [strip.rows for strip in drawn.strips] == [48, 48]
    ends = [max(bar.start + bar.width for bar in strip.bars) for strip in drawn.strips]
    assert ends[0] == pytest.approx(1000)
    assert ends[1] < 600
    assert all(bar.start >= 0 and bar.start + bar.width <= 1000.01 for strip in drawn.strips for bar in strip.bars)


def test_a_lock_step_batch_starts_together_and_holds_what_is_done() -> None:
    drawn = strips("dynamic", 16)
    first = [bar for bar in drawn.strips[0].bars if bar.row < 16]
    served = [bar for bar in first if bar.kind == "served"]
    assert {round(bar.start, 1) for bar in served} == {0.0}
    assert not any(bar.kind == "waiting" for bar in first)
    held = [bar for bar in first if bar.kind == "held"]
    assert len(held) == 15  # all but the longest
    assert len({round(bar.start + bar.width, 1) for bar in held}) == 1


def test_requests_beyond_the_seats_are_drawn_as_waiting_and_streams_are_never_held() -> None:
    for batcher in ("dynamic", "continuous"):
        bars = [bar for bar in strips(batcher, 32).strips[0].bars if 16 <= bar.row < 32]
        waiting = {bar.row: bar for bar in bars if bar.kind == "waiting"}
        assert sorted(waiting) == list(range(16, 32))
        served = {bar.row: bar for bar in bars if bar.kind == "served"}
        assert all(served[row].start == pytest.approx(bar.start + bar.width) for row, bar in waiting.items())
    assert not strips("continuous", 32).shows("held")


def test_failed_requests_stay_visible_in_the_timeline() -> None:
    results, requests = comparison(("continuous",), (4,), count=12)
    fail(results["runs"][0], requests, 2, "refused")
    requests[0]["last"] = requests[0]["sent"]
    failed = [bar for bar in timeline(results["runs"], requests).strips[0].bars if bar.kind == "failed"]
    assert len(failed) == 2
    assert all(bar.width >= 4 for bar in failed)


@pytest.mark.parametrize(("span", "last"), [(48.2, "40 s"), (0.31, "0.3 s"), (6.0, "6 s"), (1234.0, "1000 s")])
def test_the_axis_has_round_times(span: float, last: str) -> None:
    marks = ticks(span)
    assert marks[0] == ("0 s", 0.0)
    assert marks[-1][0] == last
    assert marks[-1][1] <= 100.0
    assert 2 <= len(marks) <= 7
