"""The charts beside the results as PNG: throughput and tail latency by load, and where token-slots and time went."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from slipstream_client.report.curves import load_panels
from slipstream_client.report.explain import Bars, request_time_bars, slot_bars
from slipstream_client.report.formats import short
from slipstream_client.report.labels import spread
from slipstream_client.report.plot import Panel
from slipstream_client.report.series import styles_of
from slipstream_client.report.study import Study

LABEL_LIMIT, SUBTITLE, NOTE = 24, 92, 115  # characters: of a name, of a subtitle over the whole width, of a note
INK, MUTED, RULE = "#1c1e21", "#5f6670", "#dfe2e6"
_SETTINGS: Any = {
    "font.size": 11,
    "text.parse_math": False,  # a variant's name is text, whatever signs it holds
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "text.color": INK,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "ytick.major.size": 0,
    "grid.color": RULE,
    "grid.linewidth": 0.8,
}


def write_charts(study: Study, out: Path) -> list[Path]:
    """Write a PNG for each of `CHARTS` into `out`, 1800 px wide; return their paths."""
    paths = []
    for name, draw in CHARTS.items():
        path = out / f"{name}.png"
        with matplotlib.rc_context(_SETTINGS):
            draw(study).savefig(path, dpi=200)
        paths.append(path)
    return paths


def _draw_throughput(study: Study) -> Figure:
    return _draw_panels(study, ("throughput",))


def _draw_latency(study: Study) -> Figure:
    return _draw_panels(study, ("e2e_ms", "ttft_ms"))


def _draw_panels(study: Study, keys: Sequence[str]) -> Figure:
    panels = {panel.key: panel for panel in (load_panels(study, study.main) if study.main else [])}
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    found = figure.subplots(1, len(keys), squeeze=False)[0]
    subtitles = {key: textwrap.fill(panels[key].subtitle, SUBTITLE // len(keys)) for key in keys if key in panels}
    lines = max((subtitle.count("\n") for subtitle in subtitles.values()), default=0)
    for axes, key in zip(found, keys, strict=True):
        # Filled up, so that the titles stand at one height.
        subtitle = subtitles.get(key, "")
        _panel(axes, panels.get(key), study, subtitle + "\n" * (lines - subtitle.count("\n")))
    notes = sorted({panel.note for key in keys if (panel := panels.get(key)) and panel.note})
    if notes:
        figure.supxlabel(textwrap.fill(" ".join(notes), NOTE), fontsize=10, color=MUTED, x=0.01, ha="left")
    return figure


def _panel(axes: Axes, panel: Panel | None, study: Study, subtitle: str) -> None:
    if panel is None:
        axes.text(0.5, 0.5, "nothing to show", transform=axes.transAxes, ha="center", color=MUTED)
        axes.set(xticks=[], yticks=[])
        return
    axes.set_title(f"{panel.title}\n" + "\n" * subtitle.count("\n"), loc="left", fontsize=12, fontweight="bold")
    axes.text(0, 1.03, subtitle, transform=axes.transAxes, color=MUTED, fontsize=10)
    styles = styles_of(study.variants)
    highest = [mark.high or mark.y for line in panel.lines for mark in line.marks]
    top = max([*highest, *(rule.at for rule in panel.rules if not rule.upright)]) * 1.12 or 1.0
    ends: list[tuple[float, str, str]] = []
    for line in panel.lines:
        if not line.marks:
            continue
        style = styles[line.name]
        xs, ys = [mark.x for mark in line.marks], [mark.y for mark in line.marks]
        lows = [mark.y - (mark.y if mark.low is None else mark.low) for mark in line.marks]
        highs = [(mark.y if mark.high is None else mark.high) - mark.y for mark in line.marks]
        axes.errorbar(xs, ys, [lows, highs], ls=style.line, color=style.light, lw=2, elinewidth=1.4, capsize=3)
        for mark in line.marks:
            face = "white" if mark.hollow else style.light
            axes.plot(mark.x, mark.y, style.marker, color=style.light, ms=7, mfc=face, clip_on=False, zorder=4)
        ends.append((line.marks[-1].y, f"{_label(line.name)} {short(line.marks[-1].y)}", style.light))
    for rule in panel.rules:
        if not rule.upright:
            axes.axhline(rule.at, color=MUTED, ls=":", lw=1.2)
            ends.append((rule.at, rule.label, MUTED))
    axes.set_ylim(0, top)
    axes.margins(x=0.03)
    if panel.x_ticks:
        if panel.log_x:
            axes.set_xscale("log", base=2)
        axes.set_xticks(panel.x_ticks, panel.x_labels or [f"{tick:g}" for tick in panel.x_ticks])
        axes.minorticks_off()
    axes.grid(axis="y")
    axes.set_xlabel(panel.x_title)
    ends.sort()
    places = spread([value for value, _, _ in ends], top * 0.075, top * 0.0375, top)
    for (_, text, colour), place in zip(ends, places, strict=True):
        where = (1.02, place)
        axes.annotate(text, where, xycoords=("axes fraction", "data"), va="center", color=colour, fontsize=10)


def _draw_explain(study: Study) -> Figure:
    cells = study.cells(study.main.workload, study.main.loads[-1]) if study.main else []
    pictures = [
        ("Token-slots computed for each useful token", slot_bars(cells)),
        ("Where an average request's time went, seconds", request_time_bars(cells)),
    ]
    figure = Figure(figsize=(9, 2 * (1.9 + 0.42 * max(len(cells), 1))), layout="constrained")
    for axes, (title, bars) in zip(figure.subplots(2, 1), pictures, strict=True):
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
        _stack(axes, bars)
    return figure


def _stack(axes: Axes, bars: Bars) -> None:
    if not bars.bars:
        axes.text(0.5, 0.5, "not known", transform=axes.transAxes, ha="center", color=MUTED)
        axes.set(xticks=[], yticks=[])
        return
    scale = 1000.0 if bars.key == "request_time_ms" else 1.0
    for row, bar in enumerate(bars.bars):
        left = 0.0
        for segment in bar.segments:
            width = segment.value / scale
            axes.barh(row, width, left=left, height=0.6, color=segment.part.fill, edgecolor=MUTED, linewidth=0.4)
            if segment.width >= 7:
                text = f"{segment.part.label}\n{short(width)}"
                axes.text(left + width / 2, row, text, ha="center", va="center", color=segment.part.ink, fontsize=8)
            left += width
        axes.annotate(short(left), (left, row), (5, 0), textcoords="offset points", va="center", fontsize=10)
    axes.set_yticks(range(len(bars.bars)), [_label(bar.cell.variant) for bar in bars.bars])
    axes.set_ylim(len(bars.bars) - 0.5, -0.5)
    axes.set_xlim(0, max(bar.total for bar in bars.bars) / scale * 1.07)
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    handles = [matplotlib.patches.Patch(color=part.fill, label=part.legend) for part in bars.parts]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, -0.14), ncols=2, fontsize=9, frameon=False)


def _label(name: str) -> str:
    """A variant's name cut so that it leaves room for the plot."""
    return name if len(name) <= LABEL_LIMIT else f"{name[: LABEL_LIMIT - 1]}…"


CHARTS: dict[str, Callable[[Study], Figure]] = {
    "throughput": _draw_throughput,
    "latency_p99": _draw_latency,
    "explain": _draw_explain,
}
