"""The tables that end a comparison on the terminal: one a workload and point."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from slipstream_client.report.formats import duration, times
from slipstream_client.report.study import Cell, Family, Load, Study
from slipstream_client.report.verdicts import Difference, difference

# Columns of the whole width, and where they part in two tables on a terminal that is narrower than that.
_WIDTH = 150
_LATENCY_COLUMNS = 7


def compare_tables(study: Study, width: int = _WIDTH) -> Iterator[Table]:
    """One row a variant; beside each figure stands its ratio to the baseline's, or "same" where noise explains it."""
    for family in study.families:
        for load in family.loads:
            yield from _point(study, family, load, width)


def _point(study: Study, family: Family, load: Load, width: int) -> Iterator[Table]:
    cells = study.cells(family.workload, load)
    base = study.cell(family.workload, load, study.baseline)
    tails = {cell.tail_name for cell in cells}
    one_tail = tails.pop() if len(tails) == 1 else None  # else every cell names its own
    tail = one_tail or "tail"
    headers = ["variant", "tokens/s", "", "latency mean", "", tail, "", "TTFT mean", tail, "padding", "failed"]
    rows = [list(_cells(study, cell, base, name_tail=one_tail is None)) for cell in cells]
    title = f"{family.workload}, {load.words}" + (f"; ratios to {study.baseline}" if base and len(cells) > 1 else "")
    columns = range(len(headers))
    if width >= _WIDTH:
        yield _table(title, headers, rows, columns)
    else:
        yield _table(title, headers, rows, columns[:_LATENCY_COLUMNS])
        yield _table("", headers, rows, [0, *columns[_LATENCY_COLUMNS:]])


def _table(title: str, headers: list[str], rows: list[list[str]], columns: Sequence[int]) -> Table:
    table = Table(title=escape(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(headers[column], justify="right" if column else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(row[column] for column in columns))
    return table


def _cells(study: Study, cell: Cell, base: Cell | None, *, name_tail: bool) -> Iterator[str]:
    def against_base(metric: str) -> str:
        if base is None or base is cell:
            return ""
        found = difference(study, cell, base, metric)
        return versus(found) if found else ""

    label = f" ({cell.tail_name})" if name_tail else ""
    rate, tail = cell.metric("output_tokens_per_s") or 0.0, cell.tail_ms("e2e_ms")
    slots = cell.parts("slots")
    invalid = " [red]invalid[/]" if cell.invalid_because else ""
    yield escape(cell.variant) + invalid
    yield f"{rate:.1f}"
    yield against_base("output_tokens_per_s")
    yield duration(cell.metric("e2e_mean_ms"))
    yield against_base("e2e_mean_ms")
    yield duration(tail) + (label if tail is not None else "")
    yield against_base("e2e_p99_ms") if cell.tail_name == "P99" else ""
    yield _ttft(cell, cell.metric("ttft_mean_ms"))
    yield _ttft(cell, cell.tail_ms("ttft_ms"))
    yield f"{1 - (slots['useful_decode'] + slots['useful_prefill']) / slots['total']:.0%}" if slots else "—"
    yield f"[red]{cell.failures}[/] of {cell.requests}" if cell.failures else "0"


def versus(found: Difference) -> str:
    """ "3.1x (2.94x to 3.27x)", "same (1.02x)", or with a question mark where the noise is not known."""
    if found.verdict == "same":
        return f"same ({times(found.ratio)})"
    interval = f" ({found.interval})" if found.interval else ""
    return f"{times(found.ratio)}{interval}" + (" ?" if found.verdict == "unknown" else "")


def _ttft(cell: Cell, value: float | None) -> str:
    return "no stream" if value is None and cell.succeeded and not cell.streams else duration(value)
