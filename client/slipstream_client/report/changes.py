"""What has changed against an earlier run of the same comparison, and whether that is more than noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from slipstream_client.report.formats import percent, short
from slipstream_client.report.study import METRICS, Study

_COLOURS = {"better": "green", "worse": "red", "same": "dim", "unknown": ""}


@dataclass(frozen=True)
class Change:
    """One metric of one variant at one point, then and now.

    `verdict` is better, worse, same, or unknown where one of the two has no noise floor.
    """

    workload: str
    point: str
    variant: str
    metric: str
    earlier: float
    now: float
    floor: float | None  # the larger noise floor of the two, as a ratio - 1
    verdict: str
    same_requests: bool  # both were offered the same sequence

    @property
    def ratio(self) -> float:
        return self.now / self.earlier

    @property
    def words(self) -> str:
        """What the metric is called."""
        return METRICS[self.metric].words

    @property
    def text(self) -> str:
        """ "+4.1%"."""
        return f"{(self.ratio - 1) * 100:+.1f}%"


def baseline_changes(results: dict, earlier_results: dict) -> list[Change]:
    """Every metric that both have, of cells that answered everything both times; in the order of the new results."""
    now, then = Study(results, [], []), Study(earlier_results, [], [])
    offered, earlier_offered = _offered(results), _offered(earlier_results)
    changes = []
    for cell in now.all_cells():
        earlier = then.cell(cell.workload, cell.load, cell.variant)
        if earlier is None or cell.problem or earlier.problem:
            continue
        place = cell.workload, cell.load.label
        same = offered.get(place) is not None and offered.get(place) == earlier_offered.get(place)
        for name in METRICS:
            value, before = cell.metric(name), earlier.metric(name)
            if not value or not before:
                continue
            repeats = len(cell.runs), len(earlier.runs)
            floors = [now.floor(name, *repeats), then.floor(name, *repeats)]
            floor = None if None in floors else max(known for known in floors if known is not None)
            verdict = _verdict(value / before, floor, METRICS[name].higher_is_better)
            changes.append(Change(*place, cell.variant, name, before, value, floor, verdict, same))
    return changes


def _verdict(ratio: float, floor: float | None, higher_is_better: bool) -> str:
    if floor is None:
        return "unknown"
    if abs(math.log(ratio)) <= math.log1p(floor):
        return "same"
    return "better" if (ratio > 1) == higher_is_better else "worse"


def _offered(results: dict) -> dict[tuple[str, str], str]:
    return {
        (workload["name"], point): sha256
        for workload in results["workloads"]
        for point, sha256 in (workload.get("offered") or {}).items()
    }


def changes_table(changes: Sequence[Change]) -> Table:
    """The changes on the terminal."""
    table = Table(title="against the earlier run", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for header in ("workload", "point", "variant", "metric"):
        table.add_column(header)
    for header in ("earlier", "now", "change", "noise", ""):
        table.add_column(header, justify="right")
    for change in changes:
        colour = _COLOURS[change.verdict]
        verdict = f"[{colour}]{change.verdict}[/]" if colour else change.verdict
        table.add_row(
            *map(escape, (change.workload, change.point, change.variant)), change.words, *_figures(change), verdict
        )
    return table


def _figures(change: Change) -> Iterator[str]:
    yield short(change.earlier)
    yield short(change.now)
    yield change.text
    yield percent(change.floor)
