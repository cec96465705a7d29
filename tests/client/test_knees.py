"""Knees over load: found where they are, and not where there is none."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import numpy as np
import pytest

from slipstream_client.comparison.knees import knees, latency_knee, slo_knee, throughput_knee
from slipstream_client.comparison.segmented_fit import fit_bends

LOADS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]


def repeats(values: Any, noise: float = 0.0, count: int = 3, seed: int = 0) -> list[list[float]]:
    """`count` runs at each load, each a factor off its value."""
    generator = np.random.default_rng(seed)
    return [[float(value * np.exp(noise * generator.standard_normal())) for _ in range(count)] for value in values]


def saturating(load: float) -> float:
    """Ten tokens/s for each client up to twelve, and one for each behind them."""
    return 10 * min(load, 12) + max(load - 12, 0)


def test_a_bend_is_found_where_two_lines_meet() -> None:
    x = np.array([1.0, 2, 4, 8, 16, 24, 32])
    (bend,) = fit_bends(x, np.array([[saturating(load) for load in x]]))
    assert bend.at == pytest.approx(12, abs=0.1)  # candidates lie 22 / 199 apart
    assert (bend.slope_before, bend.slope_after) == pytest.approx((10, 1), rel=0.02)
    assert bend.is_knee


def test_rows_are_fitted_one_by_one() -> None:
    x = np.array([1.0, 2, 4, 8, 16, 24, 32])
    bent, straight = [saturating(load) for load in x], list(3 * x + np.array([0, 1, 0, -1, 1, 0, -1]))
    one, other = fit_bends(x, np.array([bent, straight]))
    assert astuple(one) == pytest.approx(astuple(fit_bends(x, np.array([bent]))[0]))
    assert astuple(other) == pytest.approx(astuple(fit_bends(x, np.array([straight]))[0]))
    assert one.is_knee
    assert not other.is_knee


def test_the_throughput_knee_is_found_in_noise_with_its_confidence() -> None:
    knee = throughput_knee(LOADS, repeats(map(saturating, LOADS), noise=0.03))
    assert knee["at"] == pytest.approx(12, abs=1.5)
    assert knee["share"] > 0.95
    assert knee["low"] < 12 < knee["high"]
    assert knee["high"] - knee["low"] < 4
    assert knee["confidence"].startswith(f"in {knee['share']:.0%} of the resamples of the repeats")
    assert throughput_knee(LOADS, repeats(map(saturating, LOADS), noise=0.03)) == knee


def test_a_line_has_no_throughput_knee() -> None:
    found = [throughput_knee(LOADS, repeats(np.array(LOADS) * 10, noise=0.03, seed=seed))["at"] for seed in range(40)]
    assert found == [None] * 40
    assert throughput_knee(LOADS, repeats([50.0] * 6))["at"] is None
    assert "one line fits throughput as well" in throughput_knee(LOADS, repeats(np.array(LOADS) * 10))["reason"]


def test_a_bend_upwards_is_no_knee() -> None:
    assert throughput_knee(LOADS, repeats(load**2 for load in LOADS))["at"] is None


def test_a_slope_that_only_halves_is_no_knee() -> None:
    knee = throughput_knee(LOADS, repeats(10 * min(load, 12) + 5 * max(load - 12, 0) for load in LOADS))
    assert knee == {"at": None, "reason": "at 12 the slope of throughput over load only changes from 10 to 5"}


def test_three_loads_have_no_throughput_or_latency_knee() -> None:
    few = repeats([10, 20, 20])
    wanted = {"at": None, "reason": "3 loads were measured, and a knee needs 4"}
    assert throughput_knee([1, 2, 4], few) == latency_knee([1, 2, 4], few, few) == wanted


def test_five_runs_prove_no_throughput_knee() -> None:
    found = throughput_knee([1, 2, 4, 8], [[10], [20], [40], [40, 40]])
    assert found == {"at": None, "reason": "5 runs are too few to tell two lines from one: 6 are needed"}


def test_one_run_at_a_load_gives_a_knee_without_confidence() -> None:
    knee = throughput_knee(LOADS, repeats(map(saturating, LOADS), count=1))
    assert knee["at"] == pytest.approx(12, abs=1)
    assert (knee["share"], knee["confidence"]) == (None, "unknown: a load was measured once")


def test_the_latency_knee_is_the_load_with_the_largest_power() -> None:
    # A closed loop that saturates at 8: throughput / latency is 10, 20, 40, 80, 40, 20.
    throughputs = [10.0 * min(load, 8) for load in LOADS]
    latencies = [load / throughput * 10 for load, throughput in zip(LOADS, throughputs, strict=True)]
    knee = latency_knee(LOADS, repeats(throughputs, 0.03), repeats(latencies, 0.03, seed=1))
    assert (knee["at"], knee["share"], knee["low"], knee["high"]) == (8.0, 1.0, 8.0, 8.0)


def test_a_single_queue_has_its_latency_knee_at_half_of_its_capacity() -> None:
    """Kleinrock's own example: M/M/1, whose latency is 1 / (1 - load)."""
    rates = [0.1, 0.3, 0.4, 0.5, 0.6, 0.7, 0.9]
    assert latency_knee(rates, [[rate] for rate in rates], [[1 / (1 - rate)] for rate in rates])["at"] == 0.5


def test_two_loads_of_about_equal_power_share_the_resamples() -> None:
    throughputs, latencies = (
        [[1.0] * 3, [20.0] * 3, [30.0] * 3, [30.0] * 3],
        [[1.0] * 3, [9, 10, 11], [14, 15, 16], [90] * 3],
    )
    knee = latency_knee([1, 2, 4, 8], throughputs, latencies)
    assert knee["at"] in (2.0, 4.0)
    assert (knee["low"], knee["high"]) == (2.0, 4.0)


def test_there_is_no_latency_knee_at_either_end() -> None:
    grows = latency_knee(LOADS, repeats(LOADS), repeats([5.0] * 6))
    assert (grows["at"], grows["reason"]) == (None, "throughput grows faster than latency up to the highest load, 32")
    flat = latency_knee(LOADS, repeats([50.0] * 6), repeats(LOADS))
    assert flat["reason"] == "beyond the lowest load, 1, latency already grows faster than throughput"


def test_a_load_at_which_nothing_was_answered_leaves_no_latency_knee() -> None:
    knee = latency_knee(LOADS, repeats([1, 2, 3, 4, 5, 0]), [[1.0], [1.0], [1.0], [1.0], [2.0], [None]])
    assert knee == {"at": None, "reason": "in one of its runs no request was answered, so that it has no latency"}


def test_the_slo_knee_is_the_last_load_that_surely_keeps_it() -> None:
    # Wilson's lower ends: 0.963, 0.930, 0.848; the fourth load keeps it again, but behind one that does not.
    knee = slo_knee([1, 2, 4, 8], [100, 98, 91, 100], [100, 100, 100, 100])
    assert knee["at"] == 2.0
    assert knee["confidence"] == "attainment 98.0% (93.0% to 99.4%) at 2, 91.0% (83.8% to 95.2%) at 4"


def test_an_slo_that_is_kept_everywhere_or_nowhere_has_no_knee() -> None:
    everywhere = slo_knee([1, 2], [100, 100], [100, 100])
    reason = "attainment is surely 90% at every load: 100.0% (96.3% to 100.0%) at 2"
    assert everywhere == {"at": None, "reason": reason, "at_least": 2.0}
    nowhere = slo_knee([1, 2], [20, 100], [100, 100])["reason"]
    assert nowhere == "attainment is not surely 90% at the lowest load: 20.0% (13.3% to 28.9%) at 1"
    assert slo_knee([], [], [])["reason"] == "no load was measured"


def test_a_few_good_requests_prove_no_attainment() -> None:
    reason = slo_knee([1], [34], [34])["reason"]
    assert reason == "attainment is not surely 90% at the lowest load: 100.0% (89.8% to 100.0%) at 1"
    assert slo_knee([1], [35], [35])["at_least"] == 1.0  # 35 / (35 + 1.96 squared) = 0.901


def run(load: float, kind: str = "closed", variant: str = "dynamic", **more: Any) -> dict[str, Any]:
    field = {"closed": "concurrency", "open": "rate"}.get(kind, "speed")
    throughput = saturating(load)
    return {
        "variant": variant,
        "workload": "mixed",
        "load": {"kind": kind, field: load},
        "output_tokens_per_s": throughput,
        "e2e_intended_ms": {"p99": 1000 * load / throughput},
        "slo": {"chat": {"good": 50 if load < 16 else 30, "sent": 50}},
        "valid": True,
    } | more


def test_knees_are_of_each_variant_and_workload_over_its_runs() -> None:
    runs = [run(load) for load in LOADS for _ in range(2)] + [run(2.0, variant="static")]
    found = knees(runs, "chat")
    assert set(found) == {"dynamic/mixed", "static/mixed"}
    dynamic = found["dynamic/mixed"]
    assert dynamic["throughput"]["at"] == pytest.approx(12, abs=1)
    assert (
        dynamic["latency"]["at"] == 16.0
    )  # power is load / 100 up to 12, then 124 squared / 16 against 80 squared / 8
    assert (dynamic["slo"]["at"], dynamic["slo"]["of"]) == (8.0, "chat")
    assert found["static/mixed"]["throughput"]["at"] is None


def test_repeats_at_a_load_count_together_for_the_slo() -> None:
    assert (
        knees([run(1.0, slo={"chat": {"good": 20, "sent": 20}}) for _ in range(2)], "chat")["dynamic/mixed"]["slo"][
            "at_least"
        ]
        == 1.0
    )


def test_invalid_runs_and_replayed_traces_have_no_place_on_the_load_axis() -> None:
    runs = [*[run(load) for load in LOADS[:3]], run(8.0, valid=False), run(1.0, kind="trace")]
    assert knees(runs)["dynamic/mixed"]["throughput"]["reason"].startswith("3 loads were measured")
    only_trace = knees([run(1.0, kind="trace")])["dynamic/mixed"]
    assert only_trace["latency"]["reason"].startswith("0 loads were measured")
    assert only_trace["slo"] == {"at": None, "reason": "no target was given"}


def test_rates_and_concurrencies_are_not_mixed() -> None:
    runs = [run(load) for load in LOADS[:3]] + [run(load, kind="open") for load in LOADS[:2]]
    assert knees(runs)["dynamic/mixed"]["throughput"]["reason"].startswith("3 loads were measured")
