"""Changes against an earlier run: only those beyond the noise are called so."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
from rich.console import Console

from report_page import write_page
from simulated_comparison import comparison, fail, runs_of
from slipstream_client.report.changes import Change, baseline_changes, changes_table


def one(changes: list[Change], variant: str, metric: str) -> Change:
    (found,) = [change for change in changes if (change.variant, change.metric) == (variant, metric)]
    return found


def test_each_metric_is_judged_by_the_larger_noise_floor() -> None:
    now = comparison(("dynamic", "continuous"), ("c4",), count=12)[0]
    earlier = copy.deepcopy(now)
    now["noise"]["metrics"]["output_tokens_per_s"]["floor"] = 0.02
    earlier["noise"]["metrics"]["output_tokens_per_s"]["floor"] = 0.0859  # of one run; of the means of two 0.06
    for variant, factor in (("continuous", 1.1), ("dynamic", 1.05)):
        for run in runs_of(now, variant, "c4"):
            run["output_tokens_per_s"] *= factor
    for run in runs_of(now, "continuous", "c4"):
        run["e2e_ms"] = {name: value * 1.5 for name, value in run["e2e_ms"].items()}
    changes = baseline_changes(now, earlier)
    gained = one(changes, "continuous", "output_tokens_per_s")
    assert (gained.verdict, gained.text) == ("better", "+10.0%")
    assert gained.floor == pytest.approx(1.0859**0.5**0.5 - 1)
    assert gained.now / gained.earlier == pytest.approx(1.1)
    assert gained.same_requests
    assert one(changes, "dynamic", "output_tokens_per_s").verdict == "same"
    assert one(changes, "continuous", "e2e_p99_ms").verdict == "worse"
    assert one(changes, "continuous", "ttft_mean_ms").text == "+0.0%"
    assert not [change for change in changes if (change.variant, change.metric) == ("dynamic", "ttft_mean_ms")]


def test_without_a_floor_of_both_the_verdict_is_unknown() -> None:
    now = comparison(("dynamic",), ("c4",), count=6)[0]
    earlier = comparison(("dynamic",), ("c4",), count=6, repeats=1)[0]
    assert {change.verdict for change in baseline_changes(now, earlier)} == {"unknown"}


def test_other_requests_than_then_are_told() -> None:
    now = comparison(("dynamic",), ("c4",), count=6)[0]
    earlier = copy.deepcopy(now)
    earlier["workloads"][0]["offered"]["c4"] = "other"
    assert not any(change.same_requests for change in baseline_changes(now, earlier))


def test_only_what_both_have_and_nothing_that_failed_is_compared() -> None:
    now, requests, _ = comparison(("dynamic", "continuous"), ("c4", "c16"), count=6)
    earlier = comparison(("dynamic", "continuous"), ("c4",), count=6)[0]
    fail(now, requests, runs_of(now, "continuous", "c4"), 1, "refused")
    changes = baseline_changes(now, earlier)
    assert {(change.variant, change.point) for change in changes} == {("dynamic", "c4")}


def test_a_name_is_shown_as_it_stands_whatever_it_would_mean_as_markup() -> None:
    now = comparison(("dynamic", "[/red]"), ("c4",), count=6)[0]
    console = Console(file=io.StringIO(), width=160)
    console.print(changes_table(baseline_changes(now, now)))
    assert isinstance(console.file, io.StringIO)
    assert "[/red]" in console.file.getvalue()


def test_the_page_and_the_terminal_show_them(tmp_path: Path) -> None:
    now, requests, steps = comparison(("dynamic", "continuous"), ("c4",), count=12)
    earlier = copy.deepcopy(now)
    for run in runs_of(earlier, "continuous", "c4"):
        run["output_tokens_per_s"] /= 2
    changes = baseline_changes(now, earlier)
    page = write_page(tmp_path, now, requests, steps, changes)
    row = next(row for row in page.rows if row[0] == "continuous" and len(row) == 9 and row[3] == "useful tokens/s")
    assert row[:4] == ["continuous", "mixed", "c4", "useful tokens/s"]
    assert (row[6], row[8]) == ("+100.0%", "better")
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(changes_table(changes))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert any(line.startswith("mixed c4 continuous useful tokens/s") and line.endswith("better") for line in lines)
    assert "Against the earlier run" not in write_page(tmp_path, now, requests, steps).text
    assert "Nothing in common with the earlier run" in write_page(tmp_path, now, requests, steps, []).text
