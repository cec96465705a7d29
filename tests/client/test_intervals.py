"""Intervals: seeded, paired by request, and as wide as they claim."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from recorded import samples
from slipstream_client.comparison.intervals import interval, point_intervals, ratio_interval
from slipstream_client.comparison.noise import MetricNoise, measure_noise
from slipstream_client.comparison.resampling import PointSamples, resample_points
from slipstream_client.comparison.samples import RunSamples

SILENT = MetricNoise(degrees_of_freedom=0, sd_log=0.0)
TRIALS = 200
Interval = tuple[float, float] | None


def synthetic_run(
    generator: np.random.Generator, variant: str, repeat: int, lengths: np.ndarray, factor: float
) -> RunSamples:
    """A closed loop of eight: a request takes a time by its length, with noise of its own and of its run (5 %)."""
    run_factor = factor * np.exp(0.05 * generator.standard_normal())
    e2e_ms = 10 * lengths * np.exp(0.1 * generator.standard_normal(len(lengths)) - 0.005) * run_factor
    return samples(variant, repeat, e2e_ms, tokens=lengths, window_s=float(e2e_ms.sum() / 8000))


def coverage(truths: dict[str, float], found: Callable[[np.random.Generator, int], dict[str, Interval]]) -> list[float]:
    """Of each metric the share of trials whose interval holds the truth."""
    held = dict.fromkeys(truths, 0)
    for trial in range(TRIALS):
        intervals = found(np.random.default_rng(trial), trial)
        for metric, truth in truths.items():
            low, high = intervals[metric] or (np.inf, -np.inf)
            held[metric] += low <= truth <= high
    return [count / TRIALS for count in held.values()]


def test_the_interval_is_the_middle_95_per_cent_of_the_resamples() -> None:
    assert interval(np.arange(1001.0), SILENT, 1) == pytest.approx((25.0, 975.0))
    assert interval(np.array([1.0, np.nan]), SILENT, 1) is interval(np.array([1.0, np.inf]), SILENT, 1) is None
    assert interval(np.empty(0), SILENT, 1) is None


def test_noise_between_runs_widens_an_interval_by_students_t() -> None:
    low, high = interval(np.ones(200_000), MetricNoise(4, 0.03), 3, 3) or (0.0, 0.0)
    assert np.log([low, high]) == pytest.approx(
        [-2.77645 * 0.03 * (2 / 3) ** 0.5, 2.77645 * 0.03 * (2 / 3) ** 0.5], rel=0.02
    )


def test_a_mean_of_requests_is_covered() -> None:
    def found(generator: np.random.Generator, trial: int) -> dict[str, Interval]:
        (point,) = resample_points([samples("a", 0, generator.exponential(30, 100))], seed=trial, resamples=400)
        return {"e2e_mean_ms": interval(point.resampled["e2e_mean_ms"], SILENT, 1)}

    (mean,) = coverage({"e2e_mean_ms": 30.0}, found)
    assert 0.90 <= mean <= 0.99


def test_figures_over_requests_and_repeats_are_covered() -> None:
    def found(generator: np.random.Generator, trial: int) -> dict[str, Interval]:
        lengths = generator.exponential(30, 80)
        runs = [synthetic_run(generator, "a", repeat, lengths, 1.0) for repeat in range(3)]
        points = resample_points(runs, seed=trial, resamples=400)
        (described,) = point_intervals(points, measure_noise(points), seed=trial)
        return {metric: (figure["low"], figure["high"]) for metric, figure in described["metrics"].items()}

    mean, throughput = coverage({"e2e_mean_ms": 300 * np.exp(0.05**2 / 2), "output_tokens_per_s": 800.0}, found)
    assert 0.90 <= mean <= 0.99
    assert 0.90 <= throughput <= 0.99


def test_ratios_of_two_variants_are_covered() -> None:
    lengths = np.random.default_rng(9).exponential(30, 80)  # the same in every run, as in a comparison

    def found(generator: np.random.Generator, trial: int) -> dict[str, Interval]:
        factors = {"base": 1.0, "variant": 0.7}
        runs = [synthetic_run(generator, v, repeat, lengths, factors[v]) for repeat in range(3) for v in factors]
        base, variant = resample_points(runs, seed=trial, resamples=400)
        noise = measure_noise([base, variant]).metrics
        return {metric: ratio_interval(variant, base, metric, noise[metric], seed=trial) for metric in noise}

    mean, throughput, p99 = coverage({"e2e_mean_ms": 0.7, "output_tokens_per_s": 1 / 0.7, "e2e_p99_ms": 0.7}, found)
    assert 0.90 <= mean <= 0.99
    assert 0.90 <= throughput <= 0.99
    assert p99 >= 0.90  # of the very same requests: no resample has others


def test_what_both_sides_of_a_ratio_share_falls_out_of_it() -> None:
    e2e_ms = np.random.default_rng(4).lognormal(5, 1, 50)
    base, twice = resample_points([samples("a", 0, e2e_ms), samples("b", 0, 2 * e2e_ms)], resamples=50)
    assert np.ptp(base.resampled["e2e_mean_ms"]) > 10
    assert ratio_interval(twice, base, "e2e_mean_ms", SILENT) == pytest.approx((2.0, 2.0))
    assert ratio_interval(twice, base, "e2e_p99_ms", SILENT) == pytest.approx((2.0, 2.0))


def test_a_ratio_to_nothing_has_no_interval() -> None:
    base, other = resample_points([samples("a", 0, [np.nan]), samples("b", 0, [5.0])], resamples=10)
    assert ratio_interval(other, base, "output_tokens_per_s", SILENT) is None
    assert ratio_interval(other, base, "e2e_mean_ms", SILENT) is None


def resampled(runs: list[RunSamples], seed: int) -> PointSamples:
    return resample_points(runs, seed=seed, resamples=20)[0]


def test_resamples_depend_on_the_seed_and_on_nothing_else_that_was_measured() -> None:
    one, other = samples("a", 0, np.arange(30.0)), samples("b", 0, np.arange(31.0), point="c16")
    first, again, beside = resampled([one], 1), resampled([one], 1), resampled([one, other], 1)
    assert first.resampled["e2e_mean_ms"].tolist() == again.resampled["e2e_mean_ms"].tolist()
    assert first.resampled["e2e_mean_ms"].tolist() == beside.resampled["e2e_mean_ms"].tolist()
    assert first.resampled["e2e_mean_ms"].tolist() != resampled([one], 2).resampled["e2e_mean_ms"].tolist()


def test_a_figure_of_a_point_is_the_mean_over_its_repeats() -> None:
    point = resampled([samples("a", 1, [100, 300]), samples("a", 0, [200, 600])], 0)
    assert point.per_run["e2e_mean_ms"].tolist() == [400.0, 200.0]  # in the order of the repeats
    assert point.value("e2e_mean_ms") == 300.0
    assert point.value("ttft_mean_ms") is None
    assert resampled([samples("a", 0, [100]), samples("a", 1, [np.nan])], 0).value("e2e_mean_ms") is None


def test_intervals_say_what_they_are_of() -> None:
    points = resample_points([samples("a", 0, [100.0, 100.0])], resamples=10)
    (described,) = point_intervals(points, measure_noise(points))
    metrics = described.pop("metrics")
    assert described == {"workload": "mixed", "point": "c8", "variant": "a", "repeats": 1}
    assert metrics["e2e_mean_ms"] == {"value": 100.0, "low": 100.0, "high": 100.0}
    assert metrics["ttft_p99_ms"] == {"value": None, "low": None, "high": None}
