"""How engines are shown: a table that gives up columns where the terminal is narrow, or a line for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from slipstream_client.watch.window import QUANTILES, EngineView

_BAR_CELLS = 8
_GAP = 2  # cells between two columns
_STYLES = {"up": "green", "DOWN": "bold red"}


@dataclass(frozen=True)
class _Column:
    header: str
    importance: int  # the lowest is kept longest
    cell: Callable[[EngineView], str]


_COLUMNS = (
    _Column("engine", 0, lambda view: view.engine),
    _Column("", 1, lambda view: "up" if view.up else "DOWN"),
    _Column("run", 2, lambda view: str(view.running)),
    _Column("wait", 3, lambda view: str(view.waiting)),
    _Column("tok/s", 4, lambda view: rate(view.generated_tokens_per_s)),
    _Column("prompt", 9, lambda view: rate(view.prompt_tokens_per_s)),
    _Column("KV blocks", 5, lambda view: f"{view.kv_blocks_used}/{view.kv_blocks_total}"),
    _Column("KV used", 10, lambda view: bar(view.kv_blocks_used, view.kv_blocks_total)),
    _Column("TTFT p50/90/99", 6, lambda view: percentiles(view.ttft_s, view.streams)),
    _Column("ITL p50/90/99", 8, lambda view: percentiles(view.itl_s, view.streams)),
    _Column("E2E p50/90/99", 7, lambda view: percentiles(view.e2e_s)),
    _Column("queue", 13, lambda view: duration(view.triton_queue_mean_s)),
    _Column("preempted", 11, lambda view: grown(view.preemptions, view.new_preemptions)),
    _Column("refused", 12, lambda view: grown(view.refusals, view.new_refusals)),
)


@dataclass(frozen=True)
class Screen:
    """What the terminal shows at one time: the engines as they were last known, and whether that is now."""

    url: str
    views: Sequence[EngineView]
    error: str | None = None  # why there was no answer this time

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        title = Text(f"{self.url}  {time.strftime('%H:%M:%S')}", style="bold", overflow="ellipsis", no_wrap=True)
        if self.error is not None:
            yield Group(title, Text(f"no answer: {self.error}", style="bold red"))
            return
        if not self.views:
            yield Group(title, Text("no engine is loaded"))
            return
        yield Group(title, _table(self.views, options.max_width), Text(self._note, style="dim"))

    @property
    def _note(self) -> str:
        note = (
            f"Over the last {self.views[0].window_s:.0f} s; percentiles are estimated from histogram buckets, as "
            "Prometheus's histogram_quantile does."
        )
        if all(view.streams for view in self.views):
            return note
        return f"{note} Triton's own queue before a lock-step model is not in them (queue: its mean)."


def _table(views: Sequence[EngineView], width: int) -> Table:
    cells = {column: [column.cell(view) for view in views] for column in _COLUMNS}
    kept = set(_fitting(cells, width))
    # The box itself has a cell between two columns.
    table = Table(box=SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0), pad_edge=False, show_edge=False)
    for column in cells:
        if column in kept:
            left = column.importance <= 1
            table.add_column(column.header, justify="left" if left else "right", no_wrap=True, overflow="ellipsis")
    for row in zip(*(texts for column, texts in cells.items() if column in kept), strict=True):
        table.add_row(*(Text(text, style=_STYLES.get(text, "")) for text in row))
    return table


def _fitting(cells: Mapping[_Column, Sequence[str]], width: int) -> Iterator[_Column]:
    """The columns that fit into the width, the most important first; the first always does."""
    left = width + _GAP
    for column in sorted(cells, key=lambda column: column.importance):
        left -= max(cell_len(text) for text in (column.header, *cells[column])) + _GAP
        if left < 0 and column.importance:
            return
        yield column


def line(view: EngineView, now: str) -> str:
    """One engine in one line of plain text, for a pipe or a log."""
    facts = {
        "run": view.running,
        "wait": view.waiting,
        "kv": f"{view.kv_blocks_used}/{view.kv_blocks_total}",
        "tok/s": rate(view.generated_tokens_per_s),
        "prompt/s": rate(view.prompt_tokens_per_s),
        "ttft": percentiles(view.ttft_s, view.streams),
        "itl": percentiles(view.itl_s, view.streams),
        "e2e": percentiles(view.e2e_s),
        "queue": duration(view.triton_queue_mean_s),
        "preempted": grown(view.preemptions, view.new_preemptions),
        "refused": grown(view.refusals, view.new_refusals),
    }
    state = "up" if view.up else "DOWN"
    return f"{now} {view.engine} {state} " + " ".join(f"{name}={value}" for name, value in facts.items())


def bar(used: int, total: int) -> str:
    """How full the KV pool is; anything in use shows."""
    full = 0 if not total else min(max(round(_BAR_CELLS * used / total), 1 if used else 0), _BAR_CELLS)
    return "█" * full + "░" * (_BAR_CELLS - full)


def rate(per_second: float | None) -> str:
    return "-" if per_second is None else f"{per_second:.1f}"


def grown(total: int, new: int) -> str:
    """A count since the server's start, and how much of it is of the window."""
    return f"{total}(+{new})" if new else str(total)


def percentiles(values: Mapping[str, float] | None, streams: bool = True) -> str:
    if values is None:
        return "-" if streams else "no-stream"
    return "/".join(duration(values.get(name)) for name in QUANTILES)


def duration(seconds: float | None) -> str:
    """Two digits that matter, and the unit."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f}ms" if seconds >= 0.00995 else f"{seconds * 1000:.1f}ms"
    return f"{seconds:.1f}s" if seconds < 99.95 else f"{seconds:.0f}s"
