"""The accounts of a run, on steps and requests whose right parts can be read off."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream_client.comparison.explain import (
    REQUEST_TIMES,
    explain_engine_time,
    explain_request_time,
    explain_slots,
    request_times_ms,
)
from slipstream_client.load.records import RequestRecord


def step(start_s: float, run_s: float = 0.06, *, left: int = 1, **rows: int) -> dict[str, Any]:
    kinds = ("prefill_rows", "decode_rows", "recomputed_rows", "prompt_padding_rows", "finished_rows")
    times = {"start_s": start_s, "schedule_s": 0.01, "run_s": run_s, "update_s": 0.02}
    return times | {"left": left} | dict.fromkeys(kinds, 0) | {f"{kind}_rows": count for kind, count in rows.items()}


def record(*, sent: float, last: float, intended: float | None = None, **stats: Any) -> RequestRecord:
    return RequestRecord(
        "r", "run", 0, intended=sent if intended is None else intended, sent=sent, last=last, stats=stats or None
    )


def test_every_row_has_one_kind_and_what_the_counter_knows_beyond_them_is_unexplained() -> None:
    steps = [step(0, prefill=30, prompt_padding=10), step(1, decode=3, finished=1), step(2, decode=2, recomputed=4)]
    assert explain_slots(steps, 53) == {
        "useful_decode": 5,
        "useful_prefill": 30,
        "prompt_padding": 10,
        "finished_rows": 1,
        "recomputed": 4,
        "unexplained": 3,
        "total": 53,
    }
    assert explain_slots(steps, None) == explain_slots(steps, 50)
    assert explain_slots([], 50) is None


def test_the_time_of_the_engine_is_its_steps_and_the_gaps_between_them() -> None:
    steps = [
        step(0.5, 0.06, decode=3, finished=1),  # ends at 0.59
        step(0.60, 0.10, left=0, prefill=2),  # ends at 0.73
        step(0.80, 0.04, decode=1, recomputed=1),  # ends at 0.87
        step(2.0, 9.0, decode=1),  # of after the window
    ]
    found = explain_engine_time(steps, 0.25, 1.25)
    assert found is not None
    assert found == {
        "useful": pytest.approx(0.06 * 3 / 4 + 0.10 + 0.04 / 2),
        "wasted": pytest.approx(0.06 / 4 + 0.04 / 2),
        "scheduling": pytest.approx(3 * 0.01),
        "bookkeeping": pytest.approx(3 * 0.02),
        "messages": pytest.approx(0.60 - 0.59),
        "idle": pytest.approx((0.5 - 0.25) + (0.80 - 0.73) + (1.25 - 0.87)),
        "unexplained": pytest.approx(0.0),
        "total": 1.0,
    }
    assert explain_engine_time(steps, 3.0, 4.0) is None


STATS: dict[str, Any] = {"arrival_s": 101.2, "queue_ms": 300.0, "first_token_ms": 500.0, "inference_ms": 900.0}


def test_a_request_of_a_lock_step_batch_waits_for_the_batch_before_and_after() -> None:
    # The server's clock is 100 s ahead: it arrives at 1.2, begins at 1.5, ends at 2.4, and is let go at 3.0.
    waited = record(sent=1.0, intended=0.75, last=3.125, held_ms=600.0, **STATS)
    times = request_times_ms(waited, [0.9, 1.5], 100.0, lock_step=True)
    assert times is not None
    expected = {
        "client": 250.0,
        "triton_queue": 200.0,
        "wait_batch": 300.0,
        "prefill": 200.0,
        "decode": 700.0,
        "held": 600.0,
        "delivery": 125.0,
        "unexplained": 0.0,
        "total": 2375.0,
    }
    assert times == pytest.approx(dict.fromkeys(REQUEST_TIMES, 0.0) | expected, abs=1e-6)


def test_a_wait_in_the_queue_is_divided_by_what_was_lacking_after_the_step_that_ran() -> None:
    lacking = {"seats": 3, "blocks": 1, "budget": 0, "priority": 0}
    waited = record(sent=1.0, last=2.5, waited_for=lacking, **STATS)
    times = request_times_ms(waited, [1.1, 1.3, 1.35, 1.4, 1.5], 100.0, lock_step=False)
    assert times is not None
    assert {part: ms for part, ms in times.items() if part.startswith("wait") and ms} == pytest.approx(
        {"wait_step": 100.0, "wait_seats": 150.0, "wait_blocks": 50.0}
    )
    alone = record(sent=1.0, last=2.5, waited_for=dict.fromkeys(lacking, 0), **STATS)
    at_once = request_times_ms(alone, [1.1, 1.5], 100.0, lock_step=False)
    assert at_once is not None
    assert at_once["wait_step"] == pytest.approx(300.0)


def test_clocks_that_disagree_leave_something_unexplained_and_the_sum_holds() -> None:
    shifted = record(sent=1.3, last=2.5, **STATS)  # it arrives before it was sent
    times = request_times_ms(shifted, [], 100.0, lock_step=False)
    assert times is not None
    assert times["triton_queue"] == 0
    assert times["unexplained"] == pytest.approx(-100.0)
    assert sum(ms for part, ms in times.items() if part != "total") == pytest.approx(times["total"]) == 1200.0


def test_means_are_of_the_requests_that_were_answered_and_tell_their_times() -> None:
    failed = record(sent=1.0, last=9.0, **STATS)
    failed.error = "no"
    silent = record(sent=1.0, last=9.0)
    records = [record(sent=1.0, last=2.5, **STATS), record(sent=1.0, last=2.7, **STATS), failed, silent]
    found = explain_request_time(records, [], 100.0, lock_step=False)
    assert found is not None
    assert found["total"] == pytest.approx(1600.0)
    assert found["delivery"] == pytest.approx(200.0)
    assert explain_request_time(records, [], None, lock_step=False) is None
    assert explain_request_time([failed, silent], [], 100.0, lock_step=False) is None
