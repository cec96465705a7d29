"""95 % intervals of the figures of a point, and of their ratio between two variants.

Two things make a figure uncertain. Which requests there were: that is bootstrapped (`resampling.py`). And what the
machine did in these very runs: the two or three repeats of a point are too few to be drawn from (an interval that
resamples three of them covers the truth in three of four cases), so the noise between runs is pooled over all points
(`noise.py`) and multiplies every resample as a draw of Student's t. The interval is that of the percentiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import numpy as np

from slipstream_client.comparison.noise import LEVEL, MetricNoise, Noise
from slipstream_client.comparison.resampling import PointSamples

_BEYOND = 100.0  # as a logarithm


def point_intervals(points: Sequence[PointSamples], noise: Noise, *, seed: int = 0) -> list[dict[str, Any]]:
    """Of every variant and point its figures, each with its interval; None for what it has not."""

    def described(point: PointSamples, metric: str) -> dict[str, float | None]:
        found = interval(point.resampled[metric], noise.metrics[metric], len(point.runs), seed=seed)
        low, high = found or (None, None)
        return {"value": point.value(metric), "low": low, "high": high}

    return [
        {
            "workload": point.workload,
            "point": point.point,
            "variant": point.variant,
            "repeats": len(point.runs),
            "metrics": {metric: described(point, metric) for metric in point.per_run},
        }
        for point in points
    ]


def ratio_interval(
    point: PointSamples, base: PointSamples, metric: str, noise: MetricNoise, *, seed: int = 0
) -> tuple[float, float] | None:
    """Of the ratio of a figure of two variants that were offered the same."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = point.resampled[metric] / base.resampled[metric]
    return interval(ratios, noise, len(point.runs), len(base.runs), seed=seed)


def interval(resampled: np.ndarray, noise: MetricNoise, *repeats: int, seed: int = 0) -> tuple[float, float] | None:
    """From the resamples [n] of a figure, or of a ratio of figures, of so many repeats each.

    Without known noise it speaks of the requests alone. None where a resample has no value.
    """
    if not resampled.size or not np.isfinite(resampled).all():
        return None
    if noise.degrees_of_freedom:
        drawn = np.random.default_rng(seed).standard_t(noise.degrees_of_freedom, resampled.size)
        logs = drawn * noise.sd_log * sqrt(sum(1 / count for count in repeats))
        # With one degree of freedom a few draws are beyond any float; no percentile in use is among them.
        resampled = resampled * np.exp(np.clip(logs, -_BEYOND, _BEYOND))
    low, high = np.percentile(resampled, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return float(low), float(high)
