"""The tables on the terminal: ratios with their intervals, "same" inside the noise, names that are text."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from simulated_comparison import comparison, fail, runs_of
from slipstream_client.report.compare_table import compare_tables
from slipstream_client.report.study import Study


def lines(results: dict[str, Any], requests: list[dict[str, Any]], width: int = 160) -> list[str]:
    """What the terminal shows, single spaced."""
    console = Console(width=width, file=io.StringIO(), record=True)
    for table in compare_tables(Study(results, requests, []), width):
        console.print(table)
    return [" ".join(line.split()) for line in console.export_text().splitlines()]


def test_there_is_a_table_for_each_workload_and_point() -> None:
    results, requests, _ = comparison(("dynamic", "continuous"), ("c4", "c16", "r2"), ("mixed", "variance:0"), count=6)
    titles = [table.title for table in compare_tables(Study(results, requests, []))]
    loads = ("4 clients", "16 clients", "2 requests/s")
    assert titles == [f"{name}, {load}; ratios to dynamic" for name in ("mixed", "variance:0") for load in loads]


def test_ratios_have_their_interval_and_fall_away_where_requests_failed() -> None:
    results, requests, _ = comparison(("dynamic", "continuous"), ("c16",), count=12)
    gain = results["comparisons"][0]["metrics"]["output_tokens_per_s"]
    rate = sum(run["output_tokens_per_s"] for run in runs_of(results, "continuous")) / 2
    start = f"continuous {rate:.1f} {gain['ratio']:.{1 if gain['ratio'] >= 1.95 else 2}f}x ({gain['low']:.2f}x to "
    assert any(line.startswith(start) for line in lines(results, requests))
    assert any(line.startswith("dynamic ") and "no stream no stream" in line for line in lines(results, requests))
    fail(results, requests, runs_of(results, "continuous"), 1, "refused")
    (row,) = [line for line in lines(results, requests) if line.startswith("continuous ")]
    assert "x (" not in row
    assert row.endswith(" 2 of 24")


def test_inside_the_noise_it_says_same_and_without_a_floor_it_asks() -> None:
    results, requests, _ = comparison(("dynamic", "continuous"), ("c1",), count=12)
    assert any("same (1.0" in line or "same (0.9" in line for line in lines(results, requests))
    results, requests, _ = comparison(("dynamic", "continuous"), ("c16",), count=12, repeats=1)
    assert any(") ? " in line for line in lines(results, requests))


def test_the_tail_is_named_for_what_it_is() -> None:
    def heads(*args: Any, **kwargs: Any) -> list[Any]:
        results, requests, _ = comparison(*args, **kwargs)
        (table,) = compare_tables(Study(results, requests, []))
        return [column.header for column in table.columns][5:6]

    assert heads(("dynamic",), ("c16",), count=12) == ["max of 24"]
    assert heads(("dynamic",), ("c16",), count=50) == ["P99"]
    results, requests, _ = comparison(("dynamic", "continuous"), ("c16",), count=12)
    fail(results, requests, runs_of(results, "dynamic"), 1, "refused")
    (table,) = compare_tables(Study(results, requests, []))
    assert table.columns[5].header == "tail"
    assert any("(max of 22)" in line for line in lines(results, requests))


def test_a_narrow_terminal_gets_two_tables() -> None:
    results, requests, _ = comparison(("dynamic", "continuous"), ("c4",), count=6)
    tables = list(compare_tables(Study(results, requests, []), 80))
    assert [len(table.columns) for table in tables] == [7, 5]


def test_invalid_points_are_marked_and_markup_in_a_name_is_text() -> None:
    results, requests, _ = comparison(("dynamic", "[red]x[/]"), ("c4",), count=6)
    results["runs"][0] |= {"valid": False, "invalid_because": ["the client fell behind"]}
    shown = lines(results, requests)
    assert any(line.startswith("dynamic invalid ") for line in shown)
    assert any(line.startswith("[red]x[/] ") for line in shown)
