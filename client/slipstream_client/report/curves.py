"""What the charts of the page show: figures against load, and distributions over requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from slipstream_client.report.formats import duration, listed, percent, short
from slipstream_client.report.knees import knee_rules
from slipstream_client.report.plot import Line, Mark, Panel, Rule
from slipstream_client.report.series import styles_of
from slipstream_client.report.study import P99_NEEDS, Cell, Family, Load, Run, Study
from slipstream_client.report.targets import attainment, slo_named, slo_title, slo_words

Interval = tuple[float, float]

CURVE_POINTS = 120
FAR = 2.5  # a target farther than this above everything measured would flatten the chart


def load_panels(study: Study, family: Family) -> list[Panel]:
    """Throughput, throughput against latency, tails and goodput, at the points of one family."""
    rate = _over_load(study, family, lambda cell: cell.mean(_rate), _interval_of("output_tokens_per_s"), "tokens/s")
    panels = [
        _panel(study, family, rate, "Useful tokens/s", "higher is better", "throughput", knee="throughput"),
        _against_latency(study, family),
        _tail_panel(study, family, "e2e_ms", "End-to-end latency", "e2e"),
        _tail_panel(study, family, "ttft_ms", "Time to first token", "ttft"),
    ]
    for name, limits in study.slo.items():
        lines = _over_load(study, family, _goodput_of(name), _goodput_span(name), "requests/s", _share_within(name))
        first = name == next(iter(study.slo))
        title, subtitle = _goodput_words(name, limits)
        if any(mark.y for line in lines for mark in line.marks):
            panels.append(_panel(study, family, lines, title, subtitle, f"goodput {name}", knee="slo" if first else ""))
    return [panel for panel in panels if not panel.empty]


def distribution_panels(study: Study, family: Family, load: Load) -> list[Panel]:
    """Cumulative distributions of TTFT and E2E over all measured requests of one point."""
    panels = []
    for key, end, title in (("cdf ttft", "first", "Time to first token"), ("cdf e2e", "last", "End-to-end latency")):
        lines = []
        for cell in study.cells(family.workload, load):
            done = [r for r in cell.records if not r["error"] and r[end] is not None]
            values = sorted((record[end] - record["sent"]) for record in done)
            if values:
                lines.append(line_of(study, cell.variant, _cumulative(cell, values), bare=True))
        silent = [c.variant for c in study.cells(family.workload, load) if not c.streams] if end == "first" else []
        subtitle = f"share of requests, {load.words}" + (f"; no stream: {listed(silent)}" if silent else "")
        panels.append(Panel(title, subtitle, lines, x_title="seconds", log_x=True, top=100.0, key=key))
    return [panel for panel in panels if not panel.empty]


def _rate(run: Run) -> float | None:
    return run["output_tokens_per_s"]


def _goodput(name: str) -> Callable[[Run], float | None]:
    return lambda run: ((run.get("slo") or {}).get(name) or {}).get("goodput_per_s")


def _goodput_of(name: str) -> Callable[[Cell], float | None]:
    return lambda cell: cell.mean(_goodput(name))


def _goodput_span(name: str) -> Callable[[Cell], Interval | None]:
    return lambda cell: cell.span(_goodput(name)) if len(cell.runs) > 1 else None


def _share_within(name: str) -> Callable[[Cell], str]:
    return lambda cell: f"; {percent(attainment(cell, name))} of the requests sent"


def _interval_of(metric: str, scale: float = 1.0) -> Callable[[Cell], Interval | None]:
    def interval(cell: Cell) -> Interval | None:
        found = cell.interval(metric)
        return (found[0] / scale, found[1] / scale) if found else None

    return interval


def line_of(study: Study, variant: str, marks: Sequence[Mark], *, bare: bool = False) -> Line:
    """The marks of a variant in its own look."""
    style = styles_of(study.variants)[variant]
    return Line(variant, study.variants.index(variant), marks, style.line == "--", style.marker, bare)


def _over_load(
    study: Study,
    family: Family,
    value_of: Callable[[Cell], float | None],
    interval_of: Callable[[Cell], Interval | None],
    unit: str,
    more: Callable[[Cell], str] = lambda cell: "",
) -> list[Line]:
    lines = []
    for variant in study.variants:
        marks = []
        for load in family.loads:
            cell = study.cell(family.workload, load, variant)
            value = value_of(cell) if cell else None
            if cell is None or value is None:
                continue
            found = interval_of(cell)
            text = f"{short(value)} {unit}" if unit != "s" else duration(value * 1000)
            within = f" ({short(found[0])} to {short(found[1])})" if found else ""
            problem = f"; {cell.problem}" if cell.problem else ""
            tip = f"{variant} at {load.words}: {text}{within}{more(cell)}{problem}"
            low, high = found or (None, None)
            marks.append(Mark(load.at, value, tip, low, high, hollow=cell.problem is not None))
        lines.append(line_of(study, variant, marks))
    return lines


def _panel(
    study: Study, family: Family, lines: list[Line], title: str, subtitle: str, key: str, knee: str = ""
) -> Panel:
    if len(family.loads) == 1:
        return _one_load(family, lines, title, subtitle, key)
    ats = [load.at for load in family.loads]
    log = len(ats) > 2 and ats[0] > 0 and ats[-1] / ats[0] > 4
    rules = knee_rules(study, family, knee) if knee else []
    note = _hollow(lines)
    return Panel(title, subtitle, lines, family.axis, x_ticks=ats, log_x=log, rules=rules, key=key, note=note)


def _one_load(family: Family, lines: Sequence[Line], title: str, subtitle: str, key: str) -> Panel:
    """Of one load there is no line to draw: its marks stand side by side."""
    beside = [replace(line, marks=[replace(mark, x=at) for mark in line.marks]) for at, line in enumerate(lines)]
    places = list(range(len(lines)))
    blank = [""] * len(lines)
    place = family.loads[0].words
    return Panel(title, subtitle, beside, place, x_ticks=places, x_labels=blank, key=key, note=_hollow(lines))


def _hollow(lines: Sequence[Line]) -> str:
    any_hollow = any(mark.hollow for line in lines for mark in line.marks)
    return "Not filled: requests failed, or the point is invalid." if any_hollow else ""


def _against_latency(study: Study, family: Family) -> Panel:
    def mean(run: Run) -> float | None:
        return run["e2e_ms"]["mean"] / 1000 if run["e2e_ms"] else None

    lines = []
    for variant in study.variants:
        marks = []
        for load in family.loads:
            cell = study.cell(family.workload, load, variant)
            x, y = (cell.mean(_rate), cell.mean(mean)) if cell else (None, None)
            if cell is None or x is None or y is None:
                continue
            x_low, x_high = cell.interval("output_tokens_per_s") or (x, x)
            low, high = _interval_of("e2e_mean_ms", 1000)(cell) or (y, y)
            tip = f"{variant} at {load.words}: {short(x)} tokens/s, mean end-to-end {duration(y * 1000)}"
            marks.append(Mark(x, y, tip, low, high, x_low, x_high, cell.problem is not None, f"{load.at:g}"))
        lines.append(line_of(study, variant, marks))
    subtitle = f"mean end-to-end latency, s; to the right and down is better; numbers: {family.axis}"
    return Panel(
        "Latency against throughput",
        subtitle,
        lines,
        "useful tokens/s",
        log_y=True,
        key="tradeoff",
        note=_hollow(lines),
    )


def _tail_panel(study: Study, family: Family, metric: str, title: str, limit: str) -> Panel:
    cells = [cell for load in family.loads for cell in study.cells(family.workload, load) if cell.succeeded]

    def tail(cell: Cell) -> float | None:
        value = cell.tail_ms(metric)
        return None if value is None else value / 1000

    p99 = all(cell.succeeded >= P99_NEEDS for cell in cells)
    interval = _interval_of(metric.replace("_ms", "_p99_ms"), 1000) if p99 else _no_interval
    lines = _over_load(study, family, tail, interval, "s")
    if metric == "ttft_ms":
        lines = [line for line in lines if line.marks]
    highest = max((mark.high or mark.y for line in lines for mark in line.marks), default=0.0)
    targets = {name: value for name, limits in study.slo.items() if (value := limits.get(limit)) is not None}
    near = {name: value for name, value in targets.items() if value / 1000 <= highest * FAR}
    rules = [Rule(value / 1000, f"target {duration(value)}") for value in sorted(set(near.values()))]
    drawn = [slo_named(name, {limit: value}) for name, value in near.items()]
    far = [slo_named(name, {limit: value}) for name, value in targets.items() if name not in near]
    silent = [v for v in study.variants if v not in {line.name for line in lines}] if metric == "ttft_ms" else []
    named = "P99" if p99 else f"P99, or the largest of fewer than {P99_NEEDS} requests"
    subtitle = f"{named}, s; lower is better" + (f"; no stream: {listed(silent)}" if silent else "")
    panel = _panel(study, family, lines, title, subtitle, metric, knee="latency" if metric == "e2e_ms" else "")
    told = (("Targets", drawn), ("Above the chart", far))
    notes = [f"{head}: {'; '.join(named)}." for head, named in told if named] + [panel.note]
    return replace(panel, rules=[*rules, *panel.rules], note=" ".join(filter(None, notes)))


def _goodput_words(name: str, limits: dict[str, float | None]) -> tuple[str, str]:
    """Title and subtitle; limits that were given as such have no other name."""
    words, title = slo_words(limits), slo_title(name, limits)
    if title == words:
        return "Goodput", f"requests/s with {words}"
    return f"Goodput, target “{title}”", f"requests/s within it: {words}"


def _no_interval(cell: Cell) -> None:
    """The largest of some requests has none."""


def _cumulative(cell: Cell, values: Sequence[float]) -> list[Mark]:
    """The curve by at most `CURVE_POINTS` points, with the median and the 99th of a hundred for the pointer."""
    count = len(values)
    indexes = sorted({round(at * (count - 1) / (CURVE_POINTS - 1)) for at in range(CURVE_POINTS)}) if count > 1 else [0]
    shown = {math.ceil(share * count) - 1: share for share in (0.5, 0.9, 0.99)}
    marks = []
    for index in sorted({*indexes, *shown}):
        share = shown.get(index)
        tip = (
            f"{cell.variant}: {share:.0%} of {count} requests within {duration(values[index] * 1000)}" if share else ""
        )
        marks.append(Mark(values[index], 100 * (index + 1) / count, tip))
    return marks
