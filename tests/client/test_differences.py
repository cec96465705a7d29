"""Verdicts: equal variants are called the same, real differences are found, and doubt is said."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from recorded import record, samples
from slipstream_client.comparison.differences import compare, superiority, verdict
from slipstream_client.comparison.noise import measure_noise
from slipstream_client.comparison.resampling import resample_points
from slipstream_client.comparison.run_figures import run_figures
from slipstream_client.comparison.samples import RunSamples
from slipstream_client.comparison.statistics import summarise_runs


def differences(runs: list[RunSamples], seed: int = 0) -> list[dict[str, Any]]:
    points = resample_points(runs, seed=seed, resamples=400)
    return compare(points, "base", measure_noise(points), seed=seed)


def synthetic(trial: int, factor: float, run_noise: float) -> list[RunSamples]:
    """Three repeats of `base` and of a variant that takes `factor` of its time; requests are noisy as well."""
    generator = np.random.default_rng(trial)
    lengths = generator.exponential(30, 60)
    runs = []
    for repeat in range(3):
        for variant, times in (("base", 1.0), ("variant", factor)):
            noise = np.exp(0.3 * generator.standard_normal(60) + run_noise * generator.standard_normal())
            e2e_ms = 10 * lengths * times * noise
            window_s = float(e2e_ms.sum() / 8000)
            runs.append(samples(variant, repeat, e2e_ms, tokens=lengths, ttft_ms=e2e_ms / 9, window_s=window_s))
    return runs


def test_equal_variants_are_called_the_same_in_95_of_100_comparisons() -> None:
    found = [differences(synthetic(trial, 1.0, 0.03), trial)[0]["metrics"] for trial in range(200)]
    for metric in found[0]:
        verdicts = [metrics[metric]["verdict"] for metrics in found]
        assert verdicts.count("same") >= 0.95 * len(verdicts), metric
        assert "unknown" not in verdicts


def test_a_difference_of_30_per_cent_is_found_in_3_per_cent_noise() -> None:
    for trial in range(50):
        metrics = differences(synthetic(trial, 0.7, 0.03), trial)[0]["metrics"]
        for metric in ("output_tokens_per_s", "e2e_mean_ms", "ttft_mean_ms"):
            assert metrics[metric]["verdict"] == "better", (trial, metric)
        assert metrics["e2e_mean_ms"]["low"] < metrics["e2e_mean_ms"]["ratio"] < metrics["e2e_mean_ms"]["high"] < 1
    metrics = differences(synthetic(0, 1 / 0.7, 0.03))[0]["metrics"]
    assert (metrics["output_tokens_per_s"]["verdict"], metrics["e2e_mean_ms"]["verdict"]) == ("worse", "worse")


@pytest.mark.parametrize(
    ("metric", "ratio", "interval", "floor", "found"),
    [
        ("output_tokens_per_s", 1.2, (1.1, 1.3), 0.1, "better"),
        ("output_tokens_per_s", 0.8, (0.7, 0.9), 0.1, "worse"),
        ("e2e_mean_ms", 1.2, (1.1, 1.3), 0.1, "worse"),
        ("e2e_mean_ms", 0.8, (0.7, 0.9), 0.1, "better"),
        ("e2e_mean_ms", 1.09, (1.05, 1.2), 0.1, "same"),  # inside the floor
        ("e2e_mean_ms", 0.92, (0.85, 0.95), 0.1, "same"),  # 1 / 1.1 = 0.909
        ("e2e_mean_ms", 0.90, (0.85, 0.95), 0.1, "better"),
        ("e2e_mean_ms", 1.2, (0.99, 1.3), 0.1, "same"),  # the interval holds 1
        ("e2e_mean_ms", 1.2, (1.1, 1.3), None, "unknown"),
        ("e2e_mean_ms", 1.2, None, 0.1, "unknown"),
        ("e2e_mean_ms", None, None, 0.1, "unknown"),
        ("output_tokens_per_s", 0.0, (0.0, 0.0), 0.1, "worse"),
    ],
)
def test_a_verdict_needs_both_the_noise_floor_and_the_interval(
    metric: str, ratio: float | None, interval: tuple[float, float] | None, floor: float | None, found: str
) -> None:
    assert verdict(metric, ratio, interval, floor) == found


def test_without_repeats_every_verdict_is_unknown() -> None:
    (found,) = differences([samples("base", 0, [100.0] * 20), samples("variant", 0, [10.0] * 20)])
    assert {difference["verdict"] for difference in found["metrics"].values()} == {"unknown"}
    assert found["metrics"]["e2e_mean_ms"]["noise"] is None
    assert found["metrics"]["e2e_mean_ms"]["ratio"] == pytest.approx(0.1)


def test_a_comparison_says_what_it_compares_and_from_what() -> None:
    def run(variant: str, repeat: int, ms: float, ttft: float) -> RunSamples:
        return samples(variant, repeat, [ms, ms], ttft_ms=[ttft, ttft], window_s=ms / 1000)

    runs = [run("base", 0, 100, np.nan), run("base", 1, 100, np.nan), run("fast", 0, 40, 10), run("fast", 1, 60, 10)]
    (found,) = differences(runs)
    assert (found["workload"], found["point"], found["variant"], found["baseline"]) == ("mixed", "c8", "fast", "base")
    e2e = found["metrics"]["e2e_mean_ms"]
    assert (e2e["value"], e2e["base"], e2e["ratio"], e2e["superiority"]) == (50.0, 100.0, 0.5, 1.0)
    # Repeats of 40 and 60 around their mean of logarithms, with one more degree of freedom from the silent baseline.
    assert e2e["noise"] == pytest.approx(np.exp(4.30265 * np.log(1.5) / 2) - 1, rel=1e-5)
    ttft = found["metrics"]["ttft_mean_ms"]  # only one of the two streams
    assert (ttft["value"], ttft["base"], ttft["ratio"], ttft["low"], ttft["superiority"]) == (
        10.0,
        None,
        None,
        None,
        None,
    )
    assert ttft["verdict"] == "unknown"


def test_only_points_that_the_baseline_was_measured_at_are_compared() -> None:
    runs = [samples("base", 0, [1.0]), samples("a", 0, [1.0]), samples("a", 0, [1.0], point="c16")]
    assert [(found["variant"], found["point"]) for found in differences(runs)] == [("a", "c8")]
    assert differences([samples("a", 0, [1.0])]) == differences([]) == []


@pytest.mark.parametrize(("failures", "said"), [(1, "better"), (2, "unknown")])
def test_a_variant_that_fails_more_is_not_called_faster(failures: int, said: str) -> None:
    answered = [50.0] * (100 - failures) + [np.nan] * failures
    base = [samples("base", repeat, [100.0] * 100) for repeat in range(2)]
    (found,) = differences([*base, samples("refusing", 0, answered), samples("refusing", 1, answered)])
    assert found["metrics"]["e2e_mean_ms"]["verdict"] == said
    assert (found["failed_share"], found["base_failed_share"]) == (failures / 100, 0.0)
    renamed = [samples("base", repeat, answered) for repeat in range(2)]
    (turned,) = differences([*renamed, samples("steady", 0, [100.0] * 100), samples("steady", 1, [100.0] * 100)])
    assert turned["metrics"]["e2e_mean_ms"]["verdict"] == {"better": "worse"}.get(said, said)


def test_superiority_is_mann_whitneys_u_by_pairs() -> None:
    generator = np.random.default_rng(2)
    mine, others = (generator.integers(0, 12, size).astype(float) for size in (17, 23))
    mine[:3] = others[:5] = np.nan
    pairs = [
        1.0
        if (a < b or (np.isnan(b) and not np.isnan(a)))
        else 0.5
        if (a == b or (np.isnan(a) and np.isnan(b)))
        else 0.0
        for a in mine
        for b in others
    ]
    assert superiority(mine, others) == pytest.approx(np.mean(pairs))
    assert superiority(np.array([1.0, 2.0]), np.array([2.0, 3.0])) == pytest.approx(3.5 / 4)
    assert superiority(np.array([]), others) is superiority(mine, np.array([np.nan])) is None


def test_runs_are_summed_up_from_results_and_records_alone() -> None:
    runs: list[dict[str, Any]] = []
    records = {}
    for variant, time_s in (("dynamic", 2.0), ("continuous", 1.0), ("broken", 9.0)):
        for repeat in range(2):
            name = f"{variant}/mixed/c2/{repeat}"
            ends = [time_s * (1 + 0.01 * repeat) * (1 + index) for index in range(10)]
            records[name] = [record(at, sent=0.0, run=name, chunks=[(end, 5)]) for at, end in enumerate(ends)]
            load = {"kind": "closed", "concurrency": 2}
            about = {"id": name, "variant": variant, "workload": "mixed", "point": "c2", "repeat": repeat, "load": load}
            runs.append(about | run_figures(records[name]) | {"valid": variant != "broken"})
    found = summarise_runs(runs, records, "dynamic")
    (comparison,) = found["comparisons"]
    for metric, key in (("e2e_mean_ms", "mean"), ("e2e_p99_ms", "p99")):
        figures = [run["e2e_intended_ms"][key] for run in runs if run["variant"] == "continuous"]
        assert comparison["metrics"][metric]["value"] == pytest.approx(sum(figures) / 2)
    throughput = [run["output_tokens_per_s"] for run in runs if run["variant"] == "continuous"]
    assert comparison["metrics"]["output_tokens_per_s"]["value"] == pytest.approx(sum(throughput) / 2)
    assert comparison["metrics"]["output_tokens_per_s"]["ratio"] == pytest.approx(2.0)
    assert (found["noise"]["runs_compared"], len(found["intervals"])) == (4, 2)
    assert set(found["knees"]) == {"dynamic/mixed", "continuous/mixed"}
    assert json.loads(json.dumps(found, allow_nan=False)) == summarise_runs(runs, records, "dynamic") == found
    assert summarise_runs([], {}, "dynamic") == {
        "intervals": [],
        "noise": {"runs_compared": 0, "metrics": {}},
        "comparisons": [],
        "knees": {},
    }
