"""Whether a variant is better than the baseline at a point, by how much, and how sure that is.

A verdict calls at most five of 100 equal pairs different; so a table of twenty verdicts may hold one that is chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log, log1p
from typing import Any, Literal

import numpy as np

from slipstream_client.comparison.intervals import ratio_interval
from slipstream_client.comparison.noise import MetricNoise, Noise
from slipstream_client.comparison.resampling import PointSamples

Verdict = Literal["better", "worse", "same", "unknown"]

HIGHER_IS_BETTER = frozenset({"output_tokens_per_s"})
# Of all requests: a side that failed more often than the other by over this share is not called faster.
MOST_MORE_FAILURES = 0.01


def compare(points: Sequence[PointSamples], baseline: str, noise: Noise, *, seed: int = 0) -> list[dict[str, Any]]:
    """Entries of "comparisons" in results.json: each other variant, wherever the baseline was measured as well."""
    bases = {(point.workload, point.point): point for point in points if point.variant == baseline}
    return [
        _comparison(point, bases[point.workload, point.point], noise, seed)
        for point in points
        if point.variant != baseline and (point.workload, point.point) in bases
    ]


def verdict(metric: str, ratio: float | None, interval: tuple[float, float] | None, floor: float | None) -> Verdict:
    """A difference counts when it exceeds the noise floor and its interval leaves 1 out; unknown without either."""
    if ratio is None or interval is None or floor is None:
        return "unknown"
    distance = abs(log(ratio)) if ratio else inf
    if distance <= log1p(floor) or interval[0] <= 1 <= interval[1]:
        return "same"
    return "better" if (ratio > 1) == (metric in HIGHER_IS_BETTER) else "worse"


def superiority(latencies: np.ndarray, others: np.ndarray) -> float | None:
    """Probability that one of `latencies` [n] is below one of `others` [m], a tie counting half.

    That is U / (n m) of Mann and Whitney (1947). NaN stands for a failed request, which is slower than any answered
    one. None where a side has no latency at all.
    """
    if np.isnan(latencies).all() or np.isnan(others).all():
        return None
    mine, ranked = np.nan_to_num(latencies, nan=np.inf), np.sort(np.nan_to_num(others, nan=np.inf))
    below, not_above = np.searchsorted(ranked, mine, side="left"), np.searchsorted(ranked, mine, side="right")
    return float(1 - (below + not_above).mean() / (2 * len(ranked)))


def _comparison(point: PointSamples, base: PointSamples, noise: Noise, seed: int) -> dict[str, Any]:
    return {
        "workload": point.workload,
        "point": point.point,
        "variant": point.variant,
        "baseline": base.variant,
        "failed_share": point.failed_share,
        "base_failed_share": base.failed_share,
        "metrics": {metric: _difference(metric, point, base, noise.metrics[metric], seed) for metric in point.per_run},
    }


def _difference(metric: str, point: PointSamples, base: PointSamples, noise: MetricNoise, seed: int) -> dict[str, Any]:
    value, base_value = point.value(metric), base.value(metric)
    ratio = value / base_value if value is not None and base_value else None
    interval = ratio_interval(point, base, metric, noise, seed=seed)
    floor = noise.floor(len(point.runs), len(base.runs))
    found = verdict(metric, ratio, interval, floor)
    more_failures = point.failed_share - base.failed_share
    winner_failed_more = {"better": more_failures, "worse": -more_failures}.get(found, 0.0) > MOST_MORE_FAILURES
    if winner_failed_more and metric not in HIGHER_IS_BETTER:
        found = "unknown"
    low, high = interval or (None, None)
    return {
        "value": value,
        "base": base_value,
        "ratio": ratio,
        "low": low,
        "high": high,
        "noise": floor,
        "verdict": found,
        "superiority": _superiority(metric, point, base),
    }


def _superiority(metric: str, point: PointSamples, base: PointSamples) -> float | None:
    """Over the requests of all repeats; it goes with the mean."""
    if metric == "e2e_mean_ms":
        return superiority(*(np.concatenate([run.e2e_ms for run in side.runs]) for side in (point, base)))
    if metric == "ttft_mean_ms":
        return superiority(*(np.concatenate([run.ttft_ms for run in side.runs]) for side in (point, base)))
    return None
