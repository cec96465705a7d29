"""Occupancy strips: time-weighted, on one scale, with the seats; KV cache as reserved and as filled."""

from __future__ import annotations

from typing import Any

import pytest

from simulated_comparison import comparison
from slipstream_client.report.occupancy import SLICES, Occupancy, occupancy
from slipstream_client.report.study import Study

STEP: dict[str, Any] = {
    "schedule_s": 0.0, "update_s": 0.0, "waiting": 3, "finished_rows": 0, "kv_blocks_used": 10, "kv_tokens_held": 80,
}  # fmt: skip


def strips(steps: list[dict[str, Any]], **engine: Any) -> Occupancy:
    """Of one run with these steps."""
    results, requests, _ = comparison(("continuous",), ("c4",), count=6, repeats=1)
    results["environment"]["engine"] = engine
    for step in steps:
        step["run"] = results["runs"][0]["id"]
    study = Study(results, requests, steps)
    return occupancy(study, study.all_cells())


def test_rows_are_averaged_over_time_and_finished_ones_stand_on_top() -> None:
    shown = strips(
        [
            STEP | {"start_s": 0.0, "run_s": 1.0, "running": 8},
            STEP | {"start_s": 1.0, "run_s": 3.0, "running": 2, "finished_rows": 6},
        ],
        max_num_seqs="16",
        block_size="16",
    )
    (strip,) = shown.strips
    assert (shown.span, shown.most_rows, strip.seats) == (4.0, 16, 16)
    assert strip.mean_working == pytest.approx((8 * 1 + 2 * 3) / 4)
    quarter = SLICES // 4
    assert strip.working == f"M0,100H0V50H{quarter}V87.5H{SLICES}V100z"  # 8, then 2 of 16 seats
    assert strip.finished == f"M0,100H0V50H{SLICES}V100z"
    assert strip.held == f"M0,100H0V50H{SLICES}V100z"  # 80 tokens are 5 of the 10 blocks
    assert strip.tips[0][2] == "0 to 0.167 s: 8.0 rows working, 3.0 waiting, 10 KV blocks (50% of them filled)"
    assert "2.0 rows working, 6.0 finished and still computed" in strip.tips[-1][2]


def test_a_slice_that_two_steps_share_is_their_mean_by_time() -> None:
    steps = [
        STEP | {"start_s": 0.0, "run_s": 1.25, "running": 8},
        STEP | {"start_s": 1.25, "run_s": SLICES - 1.25, "running": 16},
    ]
    (strip,) = strips(steps, max_num_seqs="16").strips
    assert strip.working == f"M0,100H0V50H1V12.5H2V0H{SLICES}V100z"  # 8, a quarter of 8 and the rest of 16, then 16


def test_time_without_a_step_is_empty() -> None:
    shown = strips(
        [STEP | {"start_s": 0.0, "run_s": 1.0, "running": 4}, STEP | {"start_s": 3.0, "run_s": 1.0, "running": 4}]
    )
    assert shown.strips[0].mean_working == pytest.approx(2.0)
    assert shown.strips[0].seats is None
    assert shown.strips[0].held == ""
    half = SLICES // 2
    assert shown.strips[0].working.startswith(f"M0,100H0V0H{SLICES // 4}V100H{SLICES * 3 // 4}V0")
    assert f"{half}" not in shown.strips[0].working.split("V")[0]


def test_seats_may_differ_from_model_to_model() -> None:
    one = [STEP | {"start_s": 0.0, "run_s": 1.0, "running": 4}]
    assert strips(one, max_num_seqs={"continuous": "32", "static": "8"}).strips[0].seats == 32
    assert strips(one, max_num_seqs={"static": "8"}).strips[0].seats is None


def test_a_lock_step_batch_empties_while_a_continuous_one_stays_full() -> None:
    study = Study(*comparison(("dynamic", "continuous"), ("c16",), count=48, repeats=1))
    dynamic, continuous = occupancy(study, study.all_cells()).strips
    assert dynamic.finished
    assert not continuous.finished
    assert continuous.mean_working > 1.3 * dynamic.mean_working


def test_without_steps_there_is_nothing() -> None:
    assert strips([]).strips == []
