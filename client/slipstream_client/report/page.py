"""The report of a comparison: one HTML file that loads nothing and says what was found, why, and how it was measured.

This module shapes the data; page.html.jinja lays it out. Every value from the data is escaped by the template engine.
"""

from __future__ import annotations

import base64
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from slipstream_client.report import series, timeline
from slipstream_client.report.batching import batching_doubt, mean_batch
from slipstream_client.report.charts import CHARTS, DARK, LIGHT, chart_svg
from slipstream_client.report.headline import SAME_WITHIN, headline
from slipstream_client.report.series import Run, series_name, succeeded

DIFFERENCES_SHOWN = 20


@dataclass(frozen=True)
class Ratio:
    """A figure against the baseline's; `verdict` is better, worse, same, or base for the baseline itself."""

    text: str
    verdict: str


@dataclass(frozen=True)
class Row:
    """One run in the tables, with what is not in results.json itself."""

    name: str
    style: int  # index into the series, which names its colour in the style sheet
    run: Run
    tail_name: str
    e2e_tail_ms: float | None
    ttft_tail_ms: float | None
    throughput: Ratio | None
    e2e_mean: Ratio | None
    e2e_tail: Ratio | None

    @property
    def mean_batch(self) -> float | None:
        """By Triton's statistics."""
        return mean_batch(self.run)

    @property
    def no_stream(self) -> bool:
        """Requests were answered, and none of them token by token."""
        return self.run["ttft_ms"] is None and succeeded(self.run) > 0


def write_report(results: dict, requests: list[dict], out: Path) -> Path:
    """Write report.html into the folder `out` (created if need be) and return its path."""
    runs = results["runs"]
    names = series.series_names(runs)
    groups = _groups(runs, requests)
    highest = groups[-1][1] if groups else []
    drawn = timeline.timeline([row.run for row in highest], requests)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "percent": percent, "size": size}
    page = environment.get_template("page.html.jinja").render(
        results=results,
        headline=headline(results, requests),
        baseline=series.baseline_name(runs),
        styles=list(series.styles_of(names).values()),
        themes={"light": LIGHT, "dark": DARK},
        groups=groups,
        highest=highest,
        tail_head=_tail_head(runs),
        charts={name: _chart_images(results, requests, name) for name in CHARTS} if runs else {},
        timeline=drawn,
        ticks=timeline.ticks(drawn.span),
        doubts=list(filter(None, map(batching_doubt, runs))),
        errors=_errors(requests),
        retries=sum(record.get("retries") or 0 for record in requests),
        lengths=_lengths(highest, requests),
        workload=list(flatten(results.get("workload") or {})),
        environment=list(flatten(results.get("environment") or {})),
        model_note=(results.get("environment") or {}).get("model_note"),
        differences_shown=DIFFERENCES_SHOWN,
        timeline_shown=timeline.SHOWN,
    )
    out.mkdir(parents=True, exist_ok=True)
    path = out / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _groups(runs: Sequence[Run], requests: Sequence[dict]) -> list[tuple[int, list[Row]]]:
    """The rows of each concurrency, ascending, each with its ratios to the baseline of the same concurrency."""
    names, base_name = series.series_names(runs), series.baseline_name(runs)
    groups = []
    for concurrency in sorted({run["concurrency"] for run in runs}):
        here = [run for run in runs if run["concurrency"] == concurrency]
        base = next((run for run in here if series_name(run) == base_name), None)
        groups.append((concurrency, [_row(run, base, names, requests) for run in here]))
    return groups


def _row(run: Run, base: Run | None, names: list[str], requests: Sequence[dict]) -> Row:
    def against_base(value: float | None, base_value: float | None, higher_is_better: bool) -> Ratio | None:
        if base is run:
            return Ratio("baseline", "base")
        factor = series.ratio(value, base_value)
        if base is None or factor is None or run["failures"] or base["failures"]:
            return None  # a run that failed requests did less work: its figures compare with nothing
        better = (factor > 1) == higher_is_better
        return Ratio(f"{factor:.2f}x", "same" if abs(factor - 1) <= SAME_WITHIN else "better" if better else "worse")

    def of_base(metric: str) -> float | None:
        return series.tail_ms(base, metric, requests) if base else None

    e2e_tail = series.tail_ms(run, "e2e_ms", requests)
    base_mean = series.figure(base, "e2e_ms", "mean") if base else None
    return Row(
        name=series_name(run),
        style=names.index(series_name(run)),
        run=run,
        tail_name=series.tail_name(run),
        e2e_tail_ms=e2e_tail,
        ttft_tail_ms=series.tail_ms(run, "ttft_ms", requests),
        throughput=against_base(run["output_tokens_per_s"], base["output_tokens_per_s"] if base else None, True),
        e2e_mean=against_base(series.figure(run, "e2e_ms", "mean"), base_mean, False),
        e2e_tail=against_base(e2e_tail, of_base("e2e_ms"), False),
    )


def _tail_head(runs: Sequence[Run]) -> str:
    """The name of the tail columns: what all runs can be called, or both names."""
    enough = {succeeded(run) >= series.P99_NEEDS for run in runs if succeeded(run)}
    return "P99 or max" if len(enough) > 1 else "max of N" if False in enough else "P99"


def _chart_images(results: dict, requests: list[dict], name: str) -> dict[str, str]:
    """The chart as data URIs, by "wide" or "narrow" and "light" or "dark"."""
    return {
        f"{shape}_{theme}": "data:image/svg+xml;base64,"
        + base64.b64encode(chart_svg(results, requests, name, dark=theme == "dark", narrow=shape == "narrow")).decode()
        for shape in ("wide", "narrow")
        for theme in ("light", "dark")
    }


def _errors(requests: Sequence[dict]) -> list[tuple[str, int, str, int]]:
    """Every distinct error: batcher, concurrency, text, how often."""
    found = Counter((r["batcher"], r["concurrency"], r["error"]) for r in requests if r["error"])
    return [(*key, count) for key, count in found.most_common()]


def _lengths(rows: list[Row], requests: Sequence[dict]) -> dict[str, dict[str, float]]:
    """Token lengths as served: of the first run at the highest concurrency that has successful records."""
    for row in rows:
        done = [record for record in series.records_of(row.run, requests) if not record["error"]]
        if done:
            return {
                "input tokens": _spread([record["input_tokens"] for record in done]),
                "output tokens": _spread([record["output_tokens"] for record in done]),
            }
    return {}


def _spread(values: list[int]) -> dict[str, float]:
    ordered = sorted(values)
    p90 = ordered[math.ceil(0.9 * len(ordered)) - 1]
    mean, median = statistics.fmean(ordered), statistics.median(ordered)
    return {"mean": mean, "min": ordered[0], "p50": median, "p90": p90, "max": ordered[-1], "total": sum(ordered)}


def flatten(value: dict, prefix: str = "") -> Iterator[tuple[str, str]]:
    """A nested description as "a.b", text pairs; a group of nothing but numbers stays one pair."""
    for key, item in value.items():
        if isinstance(item, dict) and all(type(part) in (int, float) for part in item.values()):
            yield f"{prefix}{key}", ", ".join(f"{name} {_plain(name, part)}" for name, part in item.items()) or "none"
        elif isinstance(item, dict):
            yield from flatten(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _plain(key, item)


def _plain(key: str, item: Any) -> str:
    if item is None:
        return "—"
    if isinstance(item, bool):
        return "yes" if item else "no"
    if isinstance(item, (list, tuple)):
        return ", ".join(_plain(key, part) for part in item) or "none"
    if isinstance(item, (int, float)) and key.endswith("_bytes"):
        return size(item)
    return f"{item:.6g}" if isinstance(item, float) else str(item)


def number(value: float | None, digits: int = 0) -> str:
    """Thousands separated, with a fixed count of decimals so that a column lines up; a dash for what is missing."""
    return "—" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    return "—" if value is None else f"{value * 100:.1f}%"


def size(value: float | None) -> str:
    """Bytes in the unit people read."""
    if value is None:
        return "—"
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"
