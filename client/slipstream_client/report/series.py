"""What a run of `results.json` is called, how it is drawn, and which of its figures may be compared or named P99."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Run = dict[str, Any]  # one entry of "runs" in results.json

P99_NEEDS = 100  # with fewer requests the 99th percentile is only another name for the largest value


@dataclass(frozen=True)
class Style:
    """How one batcher looks everywhere: a colour for each background; a marker and a line that work without colour."""

    light: str
    dark: str
    marker: str
    line: str = "-"


# Darkened and lightened from the Okabe-Ito palette, so that they also carry text on white and on near-black.
STYLES = {
    "continuous": Style("#0072B2", "#56A8E0", "o"),
    "dynamic": Style("#C14E00", "#F0803C", "s"),
    "static": Style("#8A4A7D", "#DC9CC4", "D", "--"),  # dashed on top: it often lies exactly on `dynamic`
    "iterative": Style("#00805E", "#3FC79C", "^"),
}
SPARE_STYLES = (Style("#7A5C00", "#E5B93C", "v"), Style("#555555", "#BBBBBB", "P"), Style("#5B3FBF", "#A794F0", "X"))


def series_name(run: Run) -> str:
    """The batcher, and its executor where that is not Slipstream's own."""
    executor = run.get("executor")
    return run["batcher"] if executor in (None, "", "native") else f"{run['batcher']} ({executor})"


def series_names(runs: Iterable[Run]) -> list[str]:
    """Every series once, in the order of the runs."""
    return list(dict.fromkeys(series_name(run) for run in runs))


def styles_of(names: Iterable[str]) -> dict[str, Style]:
    """One style a series: the known batchers always the same, any other name the next spare one."""
    styles: dict[str, Style] = {}
    spare = 0
    for name in dict.fromkeys(names):
        if name in STYLES:
            styles[name] = STYLES[name]
        else:
            styles[name] = SPARE_STYLES[spare % len(SPARE_STYLES)]
            spare += 1
    return styles


def baseline_name(runs: Sequence[Run]) -> str | None:
    """What the others are measured against: `dynamic` where it ran, else the first series."""
    names = series_names(runs)
    return "dynamic" if "dynamic" in names else next(iter(names), None)


def succeeded(run: Run) -> int:
    """Requests of a run that ended without an error."""
    return run["requests"] - run["failures"]


def records_of(run: Run, requests: Sequence[dict]) -> list[dict]:
    """The lines of requests.jsonl that belong to this run, in the order in which they were sent."""
    mine = [
        record
        for record in requests
        if (record["batcher"], record["concurrency"]) == (run["batcher"], run["concurrency"])
        and record.get("executor", run.get("executor")) == run.get("executor")
        and record["sent"] is not None
    ]
    return sorted(mine, key=lambda record: record["sent"])


def figure(run: Run, metric: str, statistic: str) -> float | None:
    """One statistic of a latency metric in milliseconds; None where the run has none."""
    statistics = run.get(metric)
    return statistics.get(statistic) if statistics else None


def tail_name(run: Run) -> str:
    """What the tail figure of this run may be called: "P99", or "max of N" where N is too small for it."""
    count = succeeded(run)
    return "P99" if count >= P99_NEEDS else f"max of {count}"


def tail_ms(run: Run, metric: str, requests: Sequence[dict]) -> float | None:
    """P99 of `e2e_ms` or `ttft_ms`, or the largest value where P99 would need more requests; None if there is none."""
    p99 = figure(run, metric, "p99")
    if p99 is None or succeeded(run) >= P99_NEEDS:
        return p99
    end = {"e2e_ms": "last", "ttft_ms": "first"}[metric]
    ended = [record for record in records_of(run, requests) if not record["error"] and record[end] is not None]
    return max(((record[end] - record["sent"]) * 1000 for record in ended), default=p99)


def ratio(value: float | None, base: float | None) -> float | None:
    """How many times `base` the value is; None where either is missing or the base is zero."""
    return value / base if value is not None and base else None
