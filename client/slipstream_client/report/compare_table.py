"""The tables that end a comparison on the terminal: one for each concurrency."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from slipstream_client.report.headline import times
from slipstream_client.report.series import (
    Run,
    baseline_name,
    figure,
    ratio,
    series_name,
    succeeded,
    tail_ms,
    tail_name,
)

# Columns of the whole width, and where they part in two tables on a terminal that is narrower than that.
_WIDTH = 107
_LATENCY_COLUMNS = 7


def compare_tables(results: dict[str, Any], requests: list[dict[str, Any]], width: int = _WIDTH) -> Iterator[Table]:
    """One row a run; beside each figure stands its ratio to the baseline's at the same concurrency."""
    runs = results["runs"]
    base_name = baseline_name(runs)
    for concurrency in sorted({run["concurrency"] for run in runs}):
        here = [run for run in runs if run["concurrency"] == concurrency]
        base = next((run for run in here if series_name(run) == base_name), None)
        tails = {tail_name(run) for run in here}
        one_tail = tails.pop() if len(tails) == 1 else None  # else every cell names its own
        tail = one_tail or "tail"
        headers = ["batcher", "tokens/s", "", "latency mean", "", tail, "", "TTFT mean", tail, "padding", "failed"]
        rows = [list(_cells(run, base, requests, name_tail=one_tail is None)) for run in here]
        title = f"concurrency {concurrency}" + (f", ratios to {base_name}" if len(here) > 1 else "")
        columns = range(len(headers))
        if width >= _WIDTH:
            yield _table(title, headers, rows, columns)
        else:
            yield _table(title, headers, rows, columns[:_LATENCY_COLUMNS])
            yield _table("", headers, rows, [0, *columns[_LATENCY_COLUMNS:]])


def _table(title: str, headers: list[str], rows: list[list[str]], columns: Sequence[int]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(headers[column], justify="right" if column else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(row[column] for column in columns))
    return table


def _cells(run: Run, base: Run | None, requests: list[dict[str, Any]], *, name_tail: bool) -> Iterator[str]:
    def against_base(value: float | None, base_value: float | None) -> str:
        # A run with failures did less work: its figures compare with nothing.
        if base is None or base is run or run["failures"] or base["failures"]:
            return ""
        factor = ratio(value, base_value)
        return "" if factor is None else times(factor)

    label = f" ({tail_name(run)})" if name_tail else ""
    rate = run["output_tokens_per_s"]
    mean, tail = figure(run, "e2e_ms", "mean"), tail_ms(run, "e2e_ms", requests)
    yield series_name(run)
    yield f"{rate:.1f}"
    yield against_base(rate, base["output_tokens_per_s"] if base else None)
    yield _duration(mean)
    yield against_base(mean, figure(base, "e2e_ms", "mean") if base else None)
    yield _duration(tail) + (label if tail is not None else "")
    yield against_base(tail, tail_ms(base, "e2e_ms", requests) if base else None)
    yield _ttft(run, figure(run, "ttft_ms", "mean"))
    yield _ttft(run, tail_ms(run, "ttft_ms", requests))
    yield "-" if run["padding_fraction"] is None else f"{run['padding_fraction']:.0%}"
    yield f"[red]{run['failures']}[/] of {run['requests']}" if run["failures"] else "0"


def _ttft(run: Run, value: float | None) -> str:
    return "no stream" if value is None and succeeded(run) else _duration(value)


def _duration(milliseconds: float | None) -> str:
    if milliseconds is None:
        return "-"
    return f"{milliseconds / 1000:.2f} s" if milliseconds >= 1000 else f"{milliseconds:.0f} ms"
