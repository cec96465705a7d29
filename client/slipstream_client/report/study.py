"""A comparison as its readers ask about it: by workload, by load, by variant, with all repeats of a run together."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Run = dict[str, Any]  # one entry of "runs" in results.json
Record = dict[str, Any]  # one line of requests.jsonl
Step = dict[str, Any]  # one line of steps.jsonl

P99_NEEDS = 100  # with fewer requests the 99th percentile is only another name for the largest value
KINDS = ("closed", "open", "trace", "burst")
SUBJECT = "continuous"  # what a comparison is about, where it ran
SWEEP_PREFIX = "variance:"


@dataclass(frozen=True)
class Metric:
    """One compared figure: where it stands in a run, and which way is better."""

    words: str
    field: str
    statistic: str | None
    higher_is_better: bool

    def of(self, run: Run) -> float | None:
        value = run.get(self.field)
        return value if self.statistic is None or value is None else value.get(self.statistic)


METRICS = {
    "output_tokens_per_s": Metric("useful tokens/s", "output_tokens_per_s", None, True),
    "e2e_mean_ms": Metric("mean end-to-end latency", "e2e_ms", "mean", False),
    "e2e_p99_ms": Metric("P99 end-to-end latency", "e2e_ms", "p99", False),
    "ttft_mean_ms": Metric("mean time to first token", "ttft_ms", "mean", False),
    "ttft_p99_ms": Metric("P99 time to first token", "ttft_ms", "p99", False),
}


@dataclass(frozen=True)
class Load:
    """One point of the load axis."""

    label: str
    kind: str
    at: float  # clients, requests/s, or the speed of a replayed trace

    @property
    def words(self) -> str:
        """As people say it."""
        if self.kind == "burst":
            return "all requests at once"
        if self.kind == "closed":
            return f"{self.at:g} client{'' if self.at == 1 else 's'}"
        return f"{self.at:g} requests/s" if self.kind == "open" else f"the trace at {self.at:g}x its speed"


def load_of(run: Run) -> Load:
    """The load of a run."""
    load = run["load"]
    if load["kind"] == "open" and not math.isfinite(float(load["rate"])):
        return Load(run["point"], "burst", 1.0)
    at = {"closed": load.get("concurrency"), "open": load.get("rate"), "trace": load.get("speed")}[load["kind"]]
    return Load(run["point"], load["kind"], float(at or 1))


@dataclass(frozen=True)
class Cell:
    """All repeats of one variant at one point of one workload."""

    workload: str
    load: Load
    variant: str
    runs: Sequence[Run]
    records: Sequence[Record] = field(repr=False)  # measured ones, of all repeats
    intervals: dict[str, dict[str, float | None]] | None = None  # of each of `METRICS`

    @property
    def requests(self) -> int:
        return self.total("requests")

    @property
    def failures(self) -> int:
        return self.total("failures")

    @property
    def succeeded(self) -> int:
        return self.requests - self.failures

    @property
    def streams(self) -> bool:
        return bool(self.runs[0]["streams"])

    @property
    def invalid_because(self) -> list[str]:
        """Why repeats of it do not count, without repetition."""
        reasons = [reason for run in self.runs if not run["valid"] for reason in run["invalid_because"] or ["not said"]]
        return list(dict.fromkeys(reasons))

    @property
    def problem(self) -> str | None:
        """Why nothing may be concluded from it."""
        if self.invalid_because:
            return f"the point of {self.variant} at {self.load.words} is invalid ({'; '.join(self.invalid_because)})"
        if self.failures:
            return f"{self.failures} of {self.requests} requests of {self.variant} failed at {self.load.words}"
        return None

    def total(self, key: str) -> int:
        return sum(run.get(key) or 0 for run in self.runs)

    def values(self, value_of: Callable[[Run], float | None]) -> list[float]:
        """One a repeat, those that have none left out."""
        return [value for run in self.runs if (value := value_of(run)) is not None]

    def mean(self, value_of: Callable[[Run], float | None]) -> float | None:
        """Over the repeats."""
        values = self.values(value_of)
        return statistics.fmean(values) if values and self.succeeded else None

    def interval(self, metric: str) -> tuple[float, float] | None:
        """The 95% interval of its mean, as in results.json; without one, from the lowest repeat to the highest."""
        found = (self.intervals or {}).get(metric) or {}
        low, high = found.get("low"), found.get("high")
        if low is not None and high is not None and self.succeeded:
            return low, high
        return self.span(METRICS[metric].of) if len(self.runs) > 1 else None

    def span(self, value_of: Callable[[Run], float | None]) -> tuple[float, float] | None:
        """From the lowest repeat to the highest."""
        values = self.values(value_of)
        return (min(values), max(values)) if values and self.succeeded else None

    def metric(self, name: str) -> float | None:
        """The mean over the repeats of one of `METRICS`."""
        return self.mean(METRICS[name].of)

    def parts(self, key: str) -> dict[str, float] | None:
        """A group of parts that add up to their "total", as the mean over the repeats that have it."""
        groups = [run[key] for run in self.runs if run.get(key)]
        if not groups:
            return None
        means = {name: statistics.fmean(group[name] for group in groups) for name in groups[0]}
        return defaultdict(float, means)

    @property
    def tail_name(self) -> str:
        """What its tail may be called: "P99", or "max of N" where N is too small for one."""
        return "P99" if self.succeeded >= P99_NEEDS else f"max of {self.succeeded}"

    def tail_ms(self, field_name: str) -> float | None:
        """P99 of `e2e_ms` or `ttft_ms` (the mean of the repeats' P99), or the largest of all where that is no P99."""
        if self.succeeded >= P99_NEEDS:
            return self.mean(lambda run: (run[field_name] or {}).get("p99"))
        end = {"e2e_ms": "last", "ttft_ms": "first"}[field_name]
        ended = [record for record in self.records if not record["error"] and record[end] is not None]
        return max(((record[end] - record["sent"]) * 1000 for record in ended), default=None)


@dataclass(frozen=True)
class Family:
    """The points of one workload that lie on one axis: its closed loops by clients, or its open loops by rate."""

    workload: str
    kind: str
    loads: Sequence[Load]  # ascending

    @property
    def axis(self) -> str:
        return {
            "closed": "clients",
            "open": "requests/s offered",
            "trace": "speed of the trace",
            "burst": "all requests at once",
        }[self.kind]


class Study:
    """The results with what belongs together found once."""

    def __init__(self, results: dict, requests: Sequence[Record], steps: Sequence[Step]) -> None:
        self.results = results
        self.runs: list[Run] = results["runs"]
        self._records = _by_run(requests)
        self._steps = _by_run(steps)
        self._comparisons = {(c["workload"], c["point"], c["variant"]): c for c in results.get("comparisons") or ()}
        groups: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
        for run in sorted(self.runs, key=lambda run: run["repeat"]):
            groups[run["workload"], run["point"], run["variant"]].append(run)
        intervals = {(i["workload"], i["point"], i["variant"]): i["metrics"] for i in results.get("intervals") or ()}
        self._cells = {}
        for key, runs in groups.items():
            records = [record for run in runs for record in self.measured(run)]
            self._cells[key] = Cell(key[0], load_of(runs[0]), key[2], runs, records, intervals.get(key))

    @cached_property
    def variants(self) -> list[str]:
        """In the order of the plan; those that ran."""
        ran = list(dict.fromkeys(run["variant"] for run in self.runs))
        planned = [variant["name"] for variant in self.results["plan"]["variants"] if variant["name"] in ran]
        return list(dict.fromkeys([*planned, *ran]))

    @property
    def baseline(self) -> str:
        return self.results["plan"]["baseline"]

    @cached_property
    def workloads(self) -> list[str]:
        """Those that ran, in the order of the results."""
        ran = {run["workload"] for run in self.runs}
        return [workload["name"] for workload in self.results["workloads"] if workload["name"] in ran]

    @cached_property
    def families(self) -> list[Family]:
        """Of all workloads, in order; closed loops first."""
        found = []
        for workload in self.workloads:
            loads = {run["point"]: load_of(run) for run in self.runs if run["workload"] == workload}
            for kind in KINDS:
                here = sorted((load for load in loads.values() if load.kind == kind), key=lambda load: load.at)
                if here:
                    found.append(Family(workload, kind, here))
        return found

    @cached_property
    def main(self) -> Family | None:
        """What the summary speaks of, in closed loops if it has any: the first workload that is no part of a sweep.

        Where all are, the one whose answers vary most: what is seen with less of it, the sweep tells.
        """
        others = [family for family in self.families if not family.workload.startswith(SWEEP_PREFIX)]
        if others:
            return others[0]
        return max(self.families, key=lambda f: self.output_length_variation(f.workload) or 0.0, default=None)

    @property
    def slo(self) -> dict[str, dict[str, float | None]]:
        return self.results["plan"].get("slo") or {}

    @property
    def repeats(self) -> int:
        """The most that any cell has."""
        return max((len(cell.runs) for cell in self._cells.values()), default=0)

    def cell(self, workload: str, load: Load, variant: str) -> Cell | None:
        return self._cells.get((workload, load.label, variant))

    def cells(self, workload: str, load: Load) -> list[Cell]:
        """The variants that ran at one point."""
        found = (self.cell(workload, load, variant) for variant in self.variants)
        return [cell for cell in found if cell]

    def all_cells(self) -> list[Cell]:
        """Workload by workload, point by point."""
        return [cell for f in self.families for load in f.loads for cell in self.cells(f.workload, load)]

    def comparison(self, cell: Cell) -> dict[str, Any] | None:
        """The entry of "comparisons" of a cell; the baseline has none."""
        return self._comparisons.get((cell.workload, cell.load.label, cell.variant))

    def floor(self, metric: str, repeats: int | None = None, other_repeats: int | None = None) -> float | None:
        """The share by which two means over so many runs of one variant differ at most in 95 of 100 cases.

        Without `repeats`, of as many as the comparison has; None where it is not known. results.json holds the floor
        of one run against one: its logarithm is in proportion to the standard error of the difference.
        """
        known = ((self.results.get("noise") or {}).get("metrics") or {}).get(metric)
        if not known or known["floor"] is None:
            return None
        repeats = repeats or self.repeats
        spread = math.sqrt((1 / repeats + 1 / (other_repeats or repeats)) / 2)
        return math.expm1(math.log1p(known["floor"]) * spread)

    def measured(self, run: Run) -> list[Record]:
        """The records of a run that count, in the order in which they were sent."""
        return [record for record in self.records(run) if record["phase"] == "measured"]

    def records(self, run: Run) -> list[Record]:
        """All records of a run that were sent, in that order."""
        sent = [record for record in self._records.get(run["id"], ()) if record["sent"] is not None]
        return sorted(sent, key=lambda record: record["sent"])

    def steps(self, run: Run) -> list[Step]:
        return self._steps.get(run["id"], [])

    def output_length_variation(self, workload: str) -> float | None:
        """Standard deviation of the output lengths that were served ÷ their mean, each request of the workload once."""
        lengths = {
            record["index"]: record["output_tokens"]
            for cell in self._cells.values()
            if cell.workload == workload
            for record in cell.records
            if not record["error"]
        }
        mean = statistics.fmean(lengths.values()) if lengths else 0
        return statistics.pstdev(lengths.values()) / mean if mean else None


def _by_run(lines: Sequence[dict]) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = defaultdict(list)
    for line in lines:
        found[line["run"]].append(line)
    return found
