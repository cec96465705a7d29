"""The report of a comparison: one HTML file that loads nothing and says what was found, why, and how sure it is.

This module shapes the data; templates/ lay it out. Every value from the data is escaped by the template engine.
"""

from __future__ import annotations

import shlex
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from slipstream_client.comparison.knees import LEAST_ATTAINMENT
from slipstream_client.report import curves, formats, sweep
from slipstream_client.report.batching import batching_doubt, mean_batch
from slipstream_client.report.changes import Change
from slipstream_client.report.diagnosis import Finding, diagnose
from slipstream_client.report.explain import (
    ENGINE_TIME,
    REQUEST_TIME,
    SLOTS,
    engine_time_bars,
    larger_steps,
    request_time_bars,
    slot_bars,
    unexplained,
)
from slipstream_client.report.knees import knee_rows
from slipstream_client.report.occupancy import occupancy
from slipstream_client.report.phases import WORDS
from slipstream_client.report.recommendations import recommendations
from slipstream_client.report.series import styles_of
from slipstream_client.report.setting import batchers, machine
from slipstream_client.report.study import METRICS, P99_NEEDS, SWEEP_PREFIX, Cell, Family, Load, Record, Study
from slipstream_client.report.summary import headline, how_sure, paragraph
from slipstream_client.report.targets import attainment, slo_named, slo_title, slo_words
from slipstream_client.report.timeline import SHOWN, ticks, timeline
from slipstream_client.report.verdicts import Difference, difference

DIFFERENCES_SHOWN = 20
SHORT_COUNTS = ("refusals", "cancelled", "empty", "retries")


@dataclass(frozen=True)
class Row:
    """One cell in the tables."""

    cell: Cell
    style: int  # index into the variants, which names its colour in the style sheet
    is_base: bool
    ratios: dict[str, Difference | None]  # by metric

    @property
    def no_stream(self) -> bool:
        return not self.cell.streams and self.cell.succeeded > 0

    @property
    def mean_batch(self) -> float | None:
        """By Triton's statistics."""
        return mean_batch(self.cell)

    def figure(self, metric: str, statistic: str | None = None) -> float | None:
        """The mean over the repeats."""
        return self.cell.mean(
            lambda run: run.get(metric) if statistic is None else (run.get(metric) or {}).get(statistic)
        )

    def interval(self, metric: str) -> tuple[float, float] | None:
        """Of the mean over the repeats."""
        return self.cell.interval(metric)

    def attainment(self, slo: str) -> float | None:
        return attainment(self.cell, slo)

    def goodput(self, slo: str) -> float | None:
        return self.cell.mean(lambda run: ((run.get("slo") or {}).get(slo) or {}).get("goodput_per_s"))

    def states(self, metric: str) -> bool:
        """Whether a ratio is given: that of a P99 only where there are requests enough to make one."""
        return not metric.endswith("p99_ms") or self.cell.tail_name == "P99"

    @property
    def counts(self) -> str:
        """Refusals, cancels, empty answers and retries that there were."""
        found = [f"{self.cell.total(key)} {key}" for key in SHORT_COUNTS if self.cell.total(key)]
        return ", ".join(found)


@dataclass(frozen=True)
class Group:
    """The rows of one point."""

    family: Family
    load: Load
    rows: Sequence[Row]

    @property
    def tail_name(self) -> str:
        """What its tails are called, or nothing where they differ."""
        names = {row.cell.tail_name for row in self.rows if row.cell.succeeded}
        return names.pop() if len(names) == 1 else ""


def write_report(study: Study, out: Path, changes: Sequence[Change] | None = None) -> Path:
    """Write report.html into the folder `out` (created if need be) and return its path."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        name: getattr(formats, name) for name in ("number", "short", "percent", "times", "duration", "size", "listed")
    }
    page = environment.get_template("page.html.jinja").render(_context(study, changes))
    out.mkdir(parents=True, exist_ok=True)
    path = out / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _context(study: Study, changes: Sequence[Change] | None) -> dict[str, Any]:
    results, main = study.results, study.main
    groups = [_group(study, family, load) for family in study.families for load in family.loads]
    top = study.cells(main.workload, main.loads[-1]) if main else []
    cells = study.all_cells()
    drawn = timeline(study, top)
    charts = [(family, curves.load_panels(study, family)) for family in study.families if not _swept(family.workload)]
    environment = results.get("environment") or {}
    return {
        "results": results,
        "study": study,
        "main": main,
        "top": top,
        "headline": headline(study),
        "paragraph": paragraph(study),
        "machine": machine(study),
        "batchers": batchers(study),
        "how_sure": how_sure(study),
        "recommendations": recommendations(study),
        "larger_steps": larger_steps(study, top),
        "silent": [name for name in study.variants if any(c.variant == name and not c.streams for c in cells)],
        "styles": list(styles_of(study.variants).values()),
        "groups": groups,
        "compared": _compared(study, groups),
        "workload_groups": _by_workload(study, groups),
        "metrics": METRICS,
        "bars": [bars for bars in (slot_bars(top), request_time_bars(top), engine_time_bars(top)) if bars.bars],
        "parts": {"slots": SLOTS, "request_time_ms": REQUEST_TIME, "engine_time_s": ENGINE_TIME},
        "every_parts": {
            "slots": [(cell, parts) for cell in cells if (parts := cell.parts("slots"))],
            "request_time_ms": [(cell, parts) for cell in cells if (parts := cell.parts("request_time_ms"))],
        },
        "unexplained": unexplained(cells),
        "charts": charts,
        "knee_drawn": any(rule.upright for _, panels in charts for panel in panels for rule in panel.rules),
        "distributions": curves.distribution_panels(study, main, main.loads[-1]) if main else [],
        "sweep": sweep.sweep_panel(study),
        "sweep_sentences": sweep.sweep_sentences(study),
        "sweep_rows": _sweep_rows(study),
        "knees": knee_rows(study),
        "occupancy": occupancy(study, top),
        "timeline": drawn,
        "phase_words": WORDS,
        "ticks": ticks,
        "timeline_shown": SHOWN,
        "findings": _findings(study),
        "doubts": [(doubt, cell.load.at > 1) for cell in cells if (doubt := batching_doubt(cell))],
        "invalid": [cell for cell in cells if cell.invalid_because],
        "errors": _errors(study),
        "changes": changes,
        "lengths": [(name, _lengths(study, name)) for name in study.workloads],
        "workloads": [_described(workload) for workload in results["workloads"]],
        "environment": list(formats.flatten(environment)),
        "model_note": environment.get("model_note"),
        "command": shlex.join(results.get("command") or []),
        "slo_titles": {name: slo_title(name, limits) for name, limits in study.slo.items()},
        "slo_words": {name: slo_words(limits) for name, limits in study.slo.items()},
        "slo_named": {name: slo_named(name, limits) for name, limits in study.slo.items()},
        "least_attainment": LEAST_ATTAINMENT,
        "differences_shown": DIFFERENCES_SHOWN,
        "p99_needs": P99_NEEDS,
    }


def _findings(study: Study) -> list[tuple[str, list[Finding]]]:
    """Of each variant that has any."""
    found = diagnose(study, study.main) if study.main else []
    each = [(variant, [finding for finding in found if finding.variant == variant]) for variant in study.variants]
    return [(variant, its) for variant, its in each if its]


def _swept(workload: str) -> bool:
    return workload.startswith(SWEEP_PREFIX)


def _group(study: Study, family: Family, load: Load) -> Group:
    cells = study.cells(family.workload, load)
    base = study.cell(family.workload, load, study.baseline)
    rows = []
    for cell in cells:
        ratios = {name: difference(study, cell, base, name) if base and base is not cell else None for name in METRICS}
        rows.append(Row(cell, study.variants.index(cell.variant), cell is base, ratios))
    return Group(family, load, rows)


def _by_workload(study: Study, groups: Sequence[Group]) -> list[tuple[str, list[Group], bool]]:
    """The groups of each workload, and whether it is a part of the sweep."""
    return [
        (workload, [group for group in groups if group.family.workload == workload], _swept(workload))
        for workload in study.workloads
    ]


def _compared(study: Study, groups: Sequence[Group]) -> list[tuple[Row, str, dict[str, Any]]]:
    """Every ratio of results.json that the page states: row, metric, figures."""
    found = []
    for row in (row for group in groups for row in group.rows):
        for metric, figures in ((study.comparison(row.cell) or {}).get("metrics") or {}).items():
            if figures["ratio"] is not None and row.states(metric):
                found.append((row, metric, figures))
    return found


def _sweep_rows(study: Study) -> list[tuple[str, float | None, Group]]:
    """Every workload of the sweep at its highest load, by how much its output lengths vary."""
    rows = []
    for family in study.families:
        if _swept(family.workload):
            variation = study.output_length_variation(family.workload)
            rows.append((family.workload, variation, _group(study, family, family.loads[-1])))
    return sorted(rows, key=lambda row: row[1] or 0.0)


def _errors(study: Study) -> list[tuple[Cell, str, str, int]]:
    """Every distinct error: where, its code and text, how often."""
    found: list[tuple[Cell, str, str, int]] = []
    for cell in study.all_cells():
        counts = Counter((r["error_code"] or "—", r["error"]) for r in cell.records if r["error"])
        found += [(cell, code, text, count) for (code, text), count in counts.most_common()]
    return found


def _lengths(study: Study, workload: str) -> dict[str, dict[str, float]]:
    """Token lengths as served: of the first cell of a workload, at its highest load, that has answers."""
    for family in study.families:
        if family.workload != workload:
            continue
        for cell in study.cells(workload, family.loads[-1]):
            done: list[Record] = [record for record in study.measured(cell.runs[0]) if not record["error"]]
            if done:
                return {
                    "input tokens": _spread([record["input_tokens"] or 0 for record in done]),
                    "output tokens": _spread([record["output_tokens"] for record in done]),
                }
    return {}


def _spread(values: list[int]) -> dict[str, float]:
    ordered = sorted(values)
    p90 = float(np.percentile(ordered, 90))
    mean, median = statistics.fmean(ordered), statistics.median(ordered)
    return {"mean": mean, "min": ordered[0], "p50": median, "p90": p90, "max": ordered[-1], "total": sum(ordered)}


def _described(workload: dict[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    return workload["name"], list(_without_name(workload))


def _without_name(workload: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, text in formats.flatten(workload):
        if key != "name":
            yield key.replace("offered.", "hash of what was offered at "), text
