"""Distributions of a request's length in tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np


class Lengths(Protocol):
    """A distribution of whole numbers of tokens; `str` tells it in words."""

    @property
    def high(self) -> int:
        """The largest number that can be drawn."""

    @property
    def expected(self) -> float:
        """The mean of what is drawn."""

    def sample(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """Draw `count` of them; the first n do not depend on `count`."""  # [count] int64


@dataclass(frozen=True)
class Constant:
    """Always the same length."""

    tokens: int

    @property
    def high(self) -> int:
        return self.tokens

    @property
    def expected(self) -> float:
        return float(self.tokens)

    def sample(self, generator: np.random.Generator, count: int) -> np.ndarray:
        return np.full(count, self.tokens)

    def __str__(self) -> str:
        return f"always {self.tokens}"


@dataclass(frozen=True)
class LogNormal:
    """A lognormal distribution given by its own mean (not that of its logarithm), rounded and clipped."""

    mean: float
    sigma: float
    low: int
    high: int

    @classmethod
    def with_expected(cls, mean: float, sigma: float, low: int, high: int) -> LogNormal:
        """The distribution whose mean is `mean` after clipping, found by bisection: clipping only shifts its centre."""
        below, above = math.log(low), math.log(high) + 2 * sigma**2
        for _ in range(60):
            middle = (below + above) / 2
            if cls(math.exp(middle), sigma, low, high).expected < mean:
                below = middle
            else:
                above = middle
        return cls(math.exp(above), sigma, low, high)

    @property
    def mu(self) -> float:
        """Mean of the logarithm."""
        return math.log(self.mean) - self.sigma**2 / 2

    @property
    def expected(self) -> float:
        """The mean after rounding and clipping: the sum of the probabilities to be at least 1, 2, 3..."""
        at_least = (self._at_least(tokens) for tokens in range(self.low + 1, self.high + 1))
        return self.low + sum(at_least)

    def _at_least(self, tokens: int) -> float:
        distance = math.log(tokens - 0.5) - self.mu
        return math.erfc(distance / (self.sigma * math.sqrt(2))) / 2 if self.sigma else float(distance < 0)

    def sample(self, generator: np.random.Generator, count: int) -> np.ndarray:
        drawn = np.rint(generator.lognormal(self.mu, self.sigma, count))
        return np.clip(drawn, self.low, self.high).astype(np.int64)

    def __str__(self) -> str:
        shape = f"lognormal, mean {self.mean:g}, sigma {self.sigma:g}"
        return f"{shape}, clipped to {self.low}..{self.high} (mean then {self.expected:.1f})"


@dataclass(frozen=True)
class QuantileTable:
    """A trace's own distribution by its percentiles: the inverse CDF, linear between them, rounded."""

    percentiles: tuple[float, ...]  # ascending, from 0 to 100
    tokens: tuple[int, ...]  # ascending, one for each
    trace_mean: float  # of the trace itself, not of the table

    @property
    def high(self) -> int:
        return self.tokens[-1]

    @property
    def expected(self) -> float:
        points = zip(self.percentiles, self.tokens, strict=True)
        return sum((p1 - p0) / 100 * (n0 + n1) / 2 for (p0, n0), (p1, n1) in pairwise(points))

    def sample(self, generator: np.random.Generator, count: int) -> np.ndarray:
        drawn = np.interp(generator.random(count) * 100, self.percentiles, self.tokens)
        return np.rint(drawn).astype(np.int64)

    def __str__(self) -> str:
        means = f"mean {self.expected:.1f} (the trace's own: {self.trace_mean:g})"
        return f"percentiles of a trace, {self.tokens[0]}..{self.high}, {means}"
