"""How one variant compares with another, and how sure that is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slipstream_client.report.formats import percent
from slipstream_client.report.study import METRICS, Cell, Study

LARGE_FLOOR = 0.1  # a noise floor above this hides differences that people care about


@dataclass(frozen=True)
class Difference:
    """The ratio of two cells in one metric; `verdict` is better, worse, same, or unknown without a noise floor."""

    ratio: float
    low: float | None
    high: float | None
    floor: float | None  # the noise floor as a ratio - 1
    verdict: str
    of_repeats: bool = False  # the interval is the repeats' own span, not a confidence interval

    @property
    def inverse(self) -> Difference:
        """The same, seen from the other side."""
        low, high = (1 / self.high if self.high else None), (1 / self.low if self.low else None)
        verdict = {"better": "worse", "worse": "better"}.get(self.verdict, self.verdict)
        return Difference(1 / self.ratio, low, high, self.floor, verdict, self.of_repeats)

    @property
    def hides_much(self) -> bool:
        """Whether a difference that matters could be there unseen."""
        return self.floor is not None and self.floor > LARGE_FLOOR

    @property
    def interval(self) -> str:
        """ "2.9x to 3.3x", or nothing."""
        if self.low is None or self.high is None:
            return ""
        digits = 2 if self.high < 9.95 else 1
        return f"{self.low:.{digits}f}x to {self.high:.{digits}f}x"

    @property
    def sure(self) -> str:
        """The certainty in words, to stand in brackets."""
        if self.floor is None:
            return "how sure is not known: the noise of this machine was not measured"
        name = "the repeats span" if self.of_repeats else "95% interval"
        known = [f"{name} {self.interval}"] if self.interval else []
        return ", ".join([*known, f"noise floor {percent(self.floor)}"])


def difference(study: Study, cell: Cell, base: Cell, metric: str) -> Difference | None:
    """Of two cells that answered everything; None where one has no figure, or failed requests.

    Against the baseline at the same point it is what results.json says; else it is judged by the noise floor, and by
    whether the repeats of the two overlap.
    """
    if cell.failures or base.failures:
        return None  # what failed requests did less work: its figures compare with nothing
    known = study.comparison(cell) if base.variant == study.baseline else None
    if known and known["baseline"] == base.variant and (cell.workload, cell.load) == (base.workload, base.load):
        found = known["metrics"].get(metric)
        if not found or not found["ratio"]:
            return None
        return Difference(found["ratio"], found["low"], found["high"], found["noise"], found["verdict"])
    known = study.comparison(base) if cell.variant == study.baseline else None
    if known and (cell.workload, cell.load) == (base.workload, base.load):
        turned = difference(study, base, cell, metric)
        return turned.inverse if turned else None
    return _by_floor(study, cell, base, metric)


def _by_floor(study: Study, cell: Cell, base: Cell, metric: str) -> Difference | None:
    rule = METRICS[metric]
    value, other = cell.metric(metric), base.metric(metric)
    span, other_span = cell.span(rule.of), base.span(rule.of)
    if not value or not other or not span or not other_span:
        return None
    found = value / other
    low, high = span[0] / other_span[1], span[1] / other_span[0]
    floor = study.floor(metric, len(cell.runs), len(base.runs))
    if floor is None:
        return Difference(found, None, None, None, "unknown", of_repeats=True)
    inside = abs(math.log(found)) <= math.log1p(floor) or low <= 1 <= high
    verdict = "same" if inside else "better" if (found > 1) == rule.higher_is_better else "worse"
    return Difference(found, low, high, floor, verdict, of_repeats=True)
