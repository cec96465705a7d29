"""The request timeline: who waited, who was served, who was held for a batch."""

from __future__ import annotations

from typing import Any

import pytest

from simulated_comparison import comparison, fail, runs_of
from slipstream_client.report.phases import phases
from slipstream_client.report.study import Study
from slipstream_client.report.timeline import Bar, Timeline, ticks, timeline

STATS = {"queue_ms": 200.0, "first_token_ms": 700.0, "inference_ms": 1500.0, "held_ms": 0.0}
RECORD: dict[str, Any] = {
    "intended": 1.0, "sent": 1.1, "first": 1.9, "last": 2.9, "error": None, "output_tokens": 9, "stats": STATS,
}  # fmt: skip


def pieces(record: dict[str, Any], offset: float | None = None) -> list[tuple[str, float, float]]:
    found = phases(record, {"clock_offset_s": offset})
    return [(phase.kind, pytest.approx(phase.start), pytest.approx(phase.end)) for phase in found]


def drawn(variant: str, point: str, count: int = 64) -> Timeline:
    study = Study(*comparison((variant,), (point,), count=count, repeats=1))
    return timeline(study, study.all_cells())


def bars_of(shown: Timeline, kind: str) -> dict[int, Bar]:
    return {n: bar for n, row in enumerate(shown.strips[0].rows) for bar in row.bars if bar.kind == kind}


def test_the_server_s_times_are_laid_back_from_the_end_where_its_clock_is_not_known() -> None:
    assert pieces(RECORD) == [
        ("client", 1.0, 1.1), ("waiting", 1.1, 1.4), ("prefill", 1.4, 1.9), ("decode", 1.9, 2.9),
    ]  # fmt: skip


def test_the_server_s_clock_places_them_where_it_is_known() -> None:
    record = RECORD | {"stats": STATS | {"arrival_s": 501.15}}
    assert pieces(record, 500.0) == [
        ("client", 1.0, 1.1), ("waiting", 1.1, 1.35), ("prefill", 1.35, 1.85), ("decode", 1.85, 2.9),
    ]  # fmt: skip


def test_an_answer_in_one_piece_was_held_after_its_own_last_token() -> None:
    record = RECORD | {"first": None, "last": 3.7, "stats": STATS | {"held_ms": 800.0}}
    assert pieces(record)[-2:] == [("decode", 1.9, 2.9), ("held", 2.9, 3.7)]


def test_times_that_do_not_fit_stay_within_the_request() -> None:
    record = RECORD | {"stats": STATS | {"arrival_s": 497.0}}
    found = phases(record, {"clock_offset_s": 500.0})
    assert [phase.kind for phase in found] == ["client", "decode"]
    assert (found[0].start, found[-1].end) == (1.0, 2.9)


def test_a_server_that_tells_no_times_leaves_what_the_stream_shows() -> None:
    assert pieces(RECORD | {"stats": None}) == [("client", 1.0, 1.1), ("first", 1.1, 1.9), ("decode", 1.9, 2.9)]
    assert pieces(RECORD | {"stats": None, "first": None}) == [("client", 1.0, 1.1), ("first", 1.1, 2.9)]


def test_the_first_requests_share_one_axis() -> None:
    study = Study(*comparison(("dynamic", "continuous"), ("c16",), count=64, repeats=1))
    shown = timeline(study, study.all_cells())
    assert [len(strip.rows) for strip in shown.strips] == [48, 48]
    ends = [max(bar.start + bar.width for row in strip.rows for bar in row.bars) for strip in shown.strips]
    assert ends[0] == pytest.approx(100)
    assert ends[1] < 60
    assert all(b.start >= 0 and b.start + b.width < 100.01 for s in shown.strips for r in s.rows for b in r.bars)


def test_a_lock_step_batch_starts_together_and_holds_what_is_done() -> None:
    shown = drawn("dynamic", "c16")
    starts = {round(bar.start, 2) for row, bar in bars_of(shown, "prefill").items() if row < 16}
    assert len(starts) == 1
    held = {row: bar for row, bar in bars_of(shown, "held").items() if row < 16}
    assert len(held) == 15  # all but the longest
    assert len({round(bar.start + bar.width, 1) for bar in held.values()}) == 1
    assert "held" in shown.kinds


@pytest.mark.parametrize("variant", ["dynamic", "continuous"])
def test_requests_beyond_the_seats_wait_and_streams_are_never_held(variant: str) -> None:
    shown = drawn(variant, "c32")
    waiting, served = bars_of(shown, "waiting"), bars_of(shown, "prefill")
    for row in range(16, 32):
        assert waiting[row].width > 1
        assert served[row].start == pytest.approx(waiting[row].start + waiting[row].width)
    assert ("held" in shown.kinds) == (variant == "dynamic")


def test_failed_requests_stay_visible() -> None:
    results, requests, steps = comparison(("continuous",), ("c4",), count=12, repeats=1)
    fail(results, requests, results["runs"], 2, "refused")
    failing = [record for record in requests if record["error"]]
    failing[0]["last"] = failing[0]["sent"]
    study = Study(results, requests, steps)
    shown = timeline(study, study.all_cells())
    failed = bars_of(shown, "failed")
    assert len(failed) == 2
    assert all(bar.width >= 0.4 for bar in failed.values())
    assert "refused; failed" in shown.strips[0].rows[min(failed)].tip


def test_requests_of_the_warm_up_are_marked() -> None:
    tips = [row.tip for row in drawn("continuous", "c4", 12).strips[0].rows]
    assert tips[0].startswith("request 0 (warm-up, not counted): ")
    assert tips[-1].startswith("request 14 (cool-down, not counted): ")
    assert "not counted" not in tips[5]


def test_the_tip_tells_lengths_and_times() -> None:
    results, requests, steps = comparison(("continuous",), ("c4",), count=12, repeats=1)
    record = next(record for record in requests if record["index"] == 5)
    study = Study(results, requests, steps)
    tip = next(row.tip for row in timeline(study, study.all_cells()).strips[0].rows if row.tip.startswith("request 5:"))
    assert f"{record['input_tokens']} tokens in, {record['output_tokens']} out" in tip
    assert "writing the answer" in tip
    assert runs_of(results, "continuous", "c4")


@pytest.mark.parametrize(("span", "last"), [(48.2, "40 s"), (0.31, "0.3 s"), (6.0, "6 s"), (1234.0, "1000 s")])
def test_the_axis_has_round_times(span: float, last: str) -> None:
    marks = ticks(span)
    assert marks[0] == ("0 s", 0.0)
    assert marks[-1][0] == last
    assert marks[-1][1] <= 100.0
    assert 2 <= len(marks) <= 7
    assert ticks(0.0) == []
