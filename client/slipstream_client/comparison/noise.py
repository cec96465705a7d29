"""The A/A control: how far runs of the same variant at the same point lie apart, and so what a difference must exceed.

Runs vary by a factor, so everything is computed on logarithms. Their standard deviation is pooled over all variants and
points, each around its own mean, which takes all of them to be about equally noisy. The floor is the prediction
interval for the difference of two means of such runs, with Student's t for the degrees of freedom of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import atan, cos, exp, pi, sin, sqrt
from typing import Any

import numpy as np

from slipstream_client.comparison.resampling import PointSamples

LEVEL = 0.95


@dataclass(frozen=True)
class MetricNoise:
    """What the repeats say of one metric; unknown without degrees of freedom."""

    degrees_of_freedom: int
    sd_log: float  # standard deviation of the logarithm between runs of the same variant

    def floor(self, repeats: int = 1, other_repeats: int = 1) -> float | None:
        """The share below which two means of so many runs of the same variant differ in 95 of 100 cases."""
        if not self.degrees_of_freedom:
            return None
        spread = self.sd_log * sqrt(1 / repeats + 1 / other_repeats)
        return exp(t_quantile(0.5 + LEVEL / 2, self.degrees_of_freedom) * spread) - 1


@dataclass(frozen=True)
class Noise:
    """Of every metric."""

    runs_compared: int
    metrics: dict[str, MetricNoise]

    def as_results(self) -> dict[str, Any]:
        """As "noise" in results.json; floors are for one run against one."""
        return {
            "runs_compared": self.runs_compared,
            "metrics": {
                metric: {"floor": noise.floor(), "degrees_of_freedom": noise.degrees_of_freedom}
                for metric, noise in self.metrics.items()
            },
        }


def measure_noise(points: Sequence[PointSamples]) -> Noise:
    """Pool the repeats of all points; a point that was measured once tells nothing."""
    repeated = [point for point in points if len(point.runs) > 1]
    metrics = points[0].per_run if points else ()
    return Noise(
        runs_compared=sum(len(point.runs) for point in repeated),
        metrics={metric: pooled_noise([point.per_run[metric] for point in repeated]) for metric in metrics},
    )


def pooled_noise(groups: Sequence[np.ndarray]) -> MetricNoise:
    """From groups [repeats] of runs that should be equal; a group with a value that is not above 0 is left out."""
    logs = [np.log(group) for group in groups if len(group) > 1 and np.all(np.isfinite(group) & (group > 0))]
    degrees = sum(len(group) - 1 for group in logs)
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in logs)
    return MetricNoise(degrees, sqrt(squares / degrees) if degrees else 0.0)


def t_quantile(probability: float, degrees_of_freedom: int) -> float:
    """Quantile above the median of Student's t: its exact distribution function, inverted by bisection."""
    low, high = 0.0, 1.0
    while _t_cdf(high, degrees_of_freedom) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if _t_cdf(middle, degrees_of_freedom) < probability:
            low = middle
        else:
            high = middle
    return high


def _t_cdf(t: float, degrees_of_freedom: int) -> float:
    """P(T <= t) for t >= 0 and whole degrees of freedom (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4)."""
    theta = atan(t / sqrt(degrees_of_freedom))
    odd = degrees_of_freedom % 2
    term = series = cos(theta) if odd else 1.0
    for k in range(1 + odd, degrees_of_freedom - 1, 2):
        term *= k / (k + 1) * cos(theta) ** 2
        series += term
    if degrees_of_freedom == 1:
        series = 0.0
    within = sin(theta) * series  # P(|T| <= t)
    return 0.5 + (2 / pi * (theta + within) if odd else within) / 2
