"""Where throughput stops growing with the load: a line that bends once, against a line that does not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_BREAKS = 200  # candidates for the place of the bend
_LARGEST_SLOPE_LEFT = 0.25  # of the slope before the bend, as guidellm's knee profile has it
STRONG = 6.0  # difference of BIC that counts as strong evidence (Kass and Raftery 1995)
_FINEST = 0.01  # of the mean: what no run repeats better than, so that a few exact points prove little


@dataclass(frozen=True)
class Bend:
    """A fit of two lines that meet at `at`."""

    at: float
    slope_before: float
    slope_after: float
    evidence: float  # BIC of the one line less BIC of the two

    @property
    def is_knee(self) -> bool:
        """The second line is clearly flatter, and two lines are clearly the better fit."""
        flatter = self.slope_before > 0 and self.slope_after <= _LARGEST_SLOPE_LEFT * self.slope_before
        return flatter and self.evidence >= STRONG


def fit_bends(x: np.ndarray, y: np.ndarray) -> list[Bend]:
    """The best continuous fit of two lines by least squares to each row of `y` [rows, n], at `x` [n].

    The bend is sought between the second smallest and the second largest x. A line has two parameters, the bent one
    four; the Bayesian information criterion (Schwarz 1978) makes that comparable.
    """
    loads = np.unique(x)
    breaks = np.linspace(loads[1], loads[-2], _BREAKS)
    line = np.stack([np.ones_like(x), x], axis=1)  # [n, 2]
    residuals = np.stack([_squares(np.c_[line, np.maximum(x - at, 0)], y) for at in breaks])  # [breaks, rows]
    best = residuals.argmin(axis=0)
    n = len(x)
    floor = n * (_FINEST * np.abs(y.mean(axis=1))) ** 2 + np.finfo(float).tiny
    straight, bent = np.maximum(_squares(line, y), floor), np.maximum(residuals.min(axis=0), floor)
    evidence = n * np.log(straight / bent) - 2 * np.log(n)
    return [_bend(x, row, breaks[at], weight) for row, at, weight in zip(y, best, evidence, strict=True)]


def _bend(x: np.ndarray, y: np.ndarray, at: float, evidence: float) -> Bend:
    design = np.stack([np.ones_like(x), x, np.maximum(x - at, 0)], axis=1)
    _, before, change = np.linalg.lstsq(design, y, rcond=None)[0]
    return Bend(float(at), float(before), float(before + change), float(evidence))


def _squares(design: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Squared residuals [rows] of each row of `y` [rows, n], fitted by least squares to `design` [n, parameters]."""
    orthogonal = np.linalg.qr(design)[0]
    return ((y - (y @ orthogonal) @ orthogonal.T) ** 2).sum(axis=1)
