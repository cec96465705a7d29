"""Charts of a comparison: throughput and tail latency against concurrency, one fixed look per batcher.

`write_charts` makes the PNGs beside the results; `chart_svg` draws the same figures for the report, light or dark, wide
or for a narrow screen.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from slipstream_client.report.series import (
    P99_NEEDS,
    Run,
    Style,
    series_name,
    series_names,
    styles_of,
    succeeded,
    tail_ms,
)

LABEL_LIMIT = 24  # characters
SUBTITLE_LIMIT = 48  # characters a line

Point = tuple[str, int, float, bool]  # series, concurrency, value, whether the run had failures


@dataclass(frozen=True)
class Theme:
    """Colours of everything that is not data."""

    background: str
    ink: str
    muted: str
    rule: str


LIGHT = Theme("#ffffff", "#1c1e21", "#5f6670", "#dfe2e6")
DARK = Theme("#15171a", "#e6e8eb", "#9aa2ad", "#2f343a")


def write_charts(results: dict, requests: list[dict], out: Path) -> list[Path]:
    """Write throughput.png and latency_p99.png into `out` (created if need be), 1800 px wide; return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw in CHARTS.items():
        path = out / f"{name}.png"
        with matplotlib.rc_context(_settings(LIGHT)):
            draw(results["runs"], requests, LIGHT, False).savefig(path, dpi=200)
        paths.append(path)
    return paths


def chart_svg(results: dict, requests: list[dict], name: str, *, dark: bool = False, narrow: bool = False) -> bytes:
    """One chart of `CHARTS` as an SVG document that loads nothing; the same results give the same bytes."""
    theme = DARK if dark else LIGHT
    buffer = io.BytesIO()
    with matplotlib.rc_context(_settings(theme)):
        figure = CHARTS[name](results["runs"], requests, theme, narrow)
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def _settings(theme: Theme) -> Any:
    return {
        "svg.fonttype": "none",  # the reader's own sans-serif, and a file of a fifth of the size
        "font.size": 11,
        "text.parse_math": False,  # a batcher's name is text, whatever signs it holds
        "svg.hashsalt": "slipstream",
        "figure.facecolor": theme.background,
        "axes.facecolor": theme.background,
        "axes.edgecolor": theme.rule,
        "axes.labelcolor": theme.muted,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "text.color": theme.ink,
        "xtick.color": theme.rule,
        "ytick.color": theme.rule,
        "xtick.labelcolor": theme.muted,
        "ytick.labelcolor": theme.muted,
        "ytick.major.size": 0,
        "grid.color": theme.rule,
        "grid.linewidth": 0.8,
    }


def _draw_throughput(runs: list[Run], requests: list[dict], theme: Theme, narrow: bool) -> Figure:
    figure = Figure(figsize=(4.3, 3.6) if narrow else (9, _height(runs)), layout="constrained")
    points = _points(runs, lambda run: run["output_tokens_per_s"])
    _panel(figure.subplots(), points, runs, theme, "Useful output tokens/s", "higher is better")
    _note_failures(figure, points, theme)
    return figure


def _draw_latency(runs: list[Run], requests: list[dict], theme: Theme, narrow: bool) -> Figure:
    spaced = ConstrainedLayoutEngine(wspace=0.08, hspace=0.08)
    figure = Figure(figsize=(4.3, 6.8) if narrow else (9, _height(runs)), layout=spaced)
    panels = figure.subplots(2, 1) if narrow else figure.subplots(1, 2)
    tail = _tail_text(runs)
    silent = series_names(run for run in runs if run["ttft_ms"] is None and succeeded(run))
    no_stream = textwrap.fill(f"no stream: {', '.join(map(_label, silent))}", SUBTITLE_LIMIT) if silent else ""
    padding = "\n" * (no_stream.count("\n") + 1) if silent else ""  # so that both titles stand at one height
    titles = {
        "e2e_ms": ("End-to-end latency", tail + padding),
        "ttft_ms": ("Time to first token", f"{tail}\n{no_stream}".rstrip()),
    }
    for axes, (metric, (title, subtitle)) in zip(panels, titles.items(), strict=True):
        points = _points(runs, lambda run, metric=metric: tail_ms(run, metric, requests))  # type: ignore[misc]
        largest = max((value for _, _, value, _ in points), default=0.0)
        unit, scale = ("s", 1000.0) if largest >= 2000 else ("ms", 1.0)
        points = [(name, at, value / scale, failed) for name, at, value, failed in points]
        _panel(axes, points, runs, theme, f"{title}, {unit}", subtitle)
    _note_failures(figure, points, theme)
    return figure


CHARTS: dict[str, Callable[[list[Run], list[dict], Theme, bool], Figure]] = {
    "throughput": _draw_throughput,
    "latency_p99": _draw_latency,
}


def _tail_text(runs: list[Run]) -> str:
    """Which figure the tails are: P99, or the largest where there are too few requests for it."""
    counts = sorted({succeeded(run) for run in runs if succeeded(run)})
    if all(count >= P99_NEEDS for count in counts):
        return "P99"
    if any(count >= P99_NEEDS for count in counts):
        return f"P99, or the max where under {P99_NEEDS} requests"
    return f"max of {', '.join(map(str, counts))} requests"


def _height(runs: list[Run]) -> float:
    """Inches: lines want room, bars as much as there are batchers."""
    return 4.4 if len({run["concurrency"] for run in runs}) > 1 else 1.8 + 0.45 * max(len(runs), 2)


def _points(runs: list[Run], value_of: Callable[[Run], float | None]) -> list[Point]:
    """What can be drawn: a run without one successful request has no point."""
    points = []
    for run in sorted(runs, key=lambda run: run["concurrency"]):
        value = value_of(run) if succeeded(run) else None
        if value is not None:
            points.append((series_name(run), run["concurrency"], float(value), run["failures"] > 0))
    return points


def _panel(axes: Axes, points: list[Point], runs: list[Run], theme: Theme, title: str, subtitle: str) -> None:
    """One titled plot: lines over concurrency, or bars where only one concurrency was measured."""
    room = "\n" * (subtitle.count("\n") + 1)
    axes.set_title(title + room, loc="left", fontsize=12, fontweight="bold")
    axes.text(0, 1.03, subtitle, transform=axes.transAxes, color=theme.muted, fontsize=10)
    if not points:
        axes.text(0.5, 0.5, "nothing to show", transform=axes.transAxes, ha="center", color=theme.muted)
        axes.set(xticks=[], yticks=[])
        return
    concurrencies = sorted({run["concurrency"] for run in runs})
    draw = _bars if len(concurrencies) == 1 else _lines
    draw(axes, points, series_names(runs), concurrencies, theme)


def _colour(style: Style, theme: Theme) -> str:
    return style.dark if theme is DARK else style.light


def _lines(axes: Axes, points: list[Point], names: list[str], concurrencies: list[int], theme: Theme) -> None:
    styles = styles_of(names)
    top = max(value for _, _, value, _ in points) * 1.12 or 1.0
    ends: list[tuple[float, int, str]] = []  # value, concurrency and name of each line's last point
    for name, style in styles.items():
        line = [(at, value, failed) for series, at, value, failed in points if series == name]
        if not line:
            continue
        colour = _colour(style, theme)
        order = 3 if style.line == "-" else 4
        ats, heights = [at for at, _, _ in line], [value for _, value, _ in line]
        axes.plot(ats, heights, style.line, color=colour, linewidth=2, zorder=order)
        for at, value, failed in line:
            face = theme.background if failed else colour
            axes.plot(at, value, style.marker, color=colour, ms=7, mfc=face, clip_on=False, zorder=order)
        ends.append((line[-1][1], line[-1][0], name))
    axes.set_ylim(0, top)
    axes.margins(x=0.03)
    axes.set_xscale("log", base=2)
    axes.set_xticks(concurrencies, [str(value) for value in concurrencies])
    axes.minorticks_off()
    axes.grid(axis="y")
    axes.set_xlabel("concurrency")
    places = _spread([value for value, _, _ in sorted(ends)], gap=top * 0.075)
    for (value, _, name), place in zip(sorted(ends), places, strict=True):
        label = f"{_label(name)} {_short(value)}"
        colour = _colour(styles[name], theme)
        axes.annotate(label, (1.02, place), xycoords=("axes fraction", "data"), va="center", color=colour, fontsize=10)


def _bars(axes: Axes, points: list[Point], names: list[str], concurrencies: list[int], theme: Theme) -> None:
    styles = styles_of(names)
    values = {name: (value, failed) for name, _, value, failed in points}
    for row, (name, style) in enumerate(styles.items()):
        if name not in values:
            axes.text(0, row, "  no figure", va="center", color=theme.muted, fontsize=10)
            continue
        value, failed = values[name]
        colour = _colour(style, theme)
        face = theme.background if failed else colour
        axes.barh(row, value, height=0.55, color=face, edgecolor=colour, linewidth=1.5)
        axes.annotate(_short(value), (value, row), (6, 0), textcoords="offset points", va="center", fontsize=10)
    axes.set_yticks(range(len(styles)), [_label(name) for name in styles])
    for label, style in zip(axes.get_yticklabels(), styles.values(), strict=True):
        label.set_color(_colour(style, theme))
    axes.set_ylim(len(styles) - 0.5, -0.5)
    axes.set_xlim(0, max(value for value, _ in values.values()) * 1.15 or 1.0)
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    axes.set_xlabel(f"at concurrency {concurrencies[0]}")


def _spread(values: list[float], gap: float) -> list[float]:
    """Heights for labels as near to the ascending `values` as lets them stand `gap` apart, none below half a gap."""
    heights = list(values)
    for _ in range(100):
        for low in range(len(heights) - 1):
            overlap = gap - (heights[low + 1] - heights[low])
            if overlap > 0:
                heights[low] -= overlap / 2
                heights[low + 1] += overlap / 2
        if heights:
            heights[0] = max(heights[0], gap / 2)
    return heights


def _label(name: str) -> str:
    """A series name cut so that it leaves room for the plot."""
    return name if len(name) <= LABEL_LIMIT else f"{name[: LABEL_LIMIT - 1]}…"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _note_failures(figure: Figure, points: list[Point], theme: Theme) -> None:
    if any(failed for _, _, _, failed in points):
        figure.supxlabel("Not filled: some requests of that run failed.", fontsize=10, color=theme.muted)
