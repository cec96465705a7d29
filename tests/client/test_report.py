"""The report: says what the data says, and no more; loads nothing; escapes everything; fits whatever was measured."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from simulated_comparison import MODEL_NOTE, comparison, fail, run_of
from slipstream_client.report.headline import headline
from slipstream_client.report.page import write_report

VOID = {"meta", "img", "source", "rect", "br"}


class Page(HTMLParser):
    """The parts of a page that the tests ask about."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.html = path.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(self.html)
        assert self.open == [], "an element was not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.text += data
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data

    def rows_of(self, name: str, columns: int) -> list[list[str]]:
        """The rows of that many cells whose head is `name`."""
        return [row for row in self.rows if row[0] == name and len(row) == columns]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a report and reads it. The charts are the business of other tests, and take most of the time."""
    monkeypatch.setattr("slipstream_client.report.page.chart_svg", lambda *_, **__: b"<svg/>")

    def write(results: dict[str, Any], requests: list[dict[str, Any]]) -> Page:
        return Page(write_report(results, requests, tmp_path))

    return write


def test_the_page_loads_nothing_and_its_charts_are_inside(tmp_path: Path) -> None:
    results, requests = comparison()
    path = write_report(results, requests, tmp_path / "new")
    assert path == tmp_path / "new" / "report.html"
    assert path.stat().st_size < 1_000_000
    page = Page(path)
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in page.tags}
    urls = [
        value
        for _, attributes in page.tags
        for key, value in attributes.items()
        if key in ("src", "srcset", "href", "poster", "action") and value
    ]
    assert len(urls) == 8  # two charts, each for light and dark, wide and narrow
    assert all(re.fullmatch(r"data:image/svg\+xml;base64,[A-Za-z0-9+/=]{4000,}", url) for url in urls)
    assert "url(" not in page.html
    assert "@import" not in page.html
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags


def test_the_table_has_each_figure_and_its_ratio_to_dynamic(page) -> None:
    results, requests = comparison()
    shown = page(results, requests)
    run, base = run_of(results, "continuous"), run_of(results, "dynamic")
    gain = run["output_tokens_per_s"] / base["output_tokens_per_s"]
    row = shown.rows_of("continuous", 11)[2]
    assert row[1:3] == [f"{run['output_tokens_per_s']:.1f}", f"{gain:.2f}x"]
    assert row[4:6] == [f"{run['e2e_ms']['mean']:,.0f}", f"{run['e2e_ms']['mean'] / base['e2e_ms']['mean']:.2f}x"]
    longest = max(r["last"] - r["sent"] for r in requests if r["batcher"] == "continuous" and r["concurrency"] == 16)
    assert row[6] == f"{longest * 1000:,.0f}"
    assert row[8] == f"{run['ttft_ms']['mean']:,.0f}"
    assert row[10] == "0 of 24"
    assert "max of N" in shown.text
    assert "max of 24 requests" in shown.text
    baseline = shown.rows_of("dynamic", 10)[2]
    assert baseline[2] == "baseline"
    assert baseline[8:] == ["no stream", "0 of 24"]


def test_with_a_hundred_requests_the_tail_is_called_p99(page) -> None:
    results, requests = comparison(("dynamic", "continuous"), (4,), count=100)
    shown = page(results, requests)
    assert "max of" not in shown.text.partition("Definitions")[0]
    assert shown.rows_of("continuous", 11)[0][6] == f"{results['runs'][1]['e2e_ms']['p99']:,.0f}"


def test_why_they_differ_shows_padding_waste_and_rows(page) -> None:
    results, requests = comparison()
    shown = page(results, requests)
    run = run_of(results, "static")
    for text in (f"{run['padding_fraction'] * 100:.1f}%", f"{run['kv_waste_fraction'] * 100:.1f}%"):
        assert shown.text.count(text) >= 2  # the bar and the table
    assert f"{run['computed_tokens'] / run['useful_tokens']:.2f}" in shown.text
    assert f"{run['useful_tokens']:,} useful of {run['computed_tokens']:,} computed" in shown.html
    assert f"width: {run['padding_fraction'] * 100:.2f}%" in shown.html


def test_a_dynamic_batcher_that_formed_no_batch_is_shown_to_be_none(page) -> None:
    """DYN-05."""
    results, requests = comparison()
    shown = page(results, requests)
    assert [row[6] for row in shown.rows_of("dynamic", 7)] == ["1.00", "4.00", "12.00"]
    assert "dynamic at concurrency 1: Triton's dynamic batcher did not batch (24 requests in 24 exec" in shown.text
    assert shown.text.count("did not batch") == 1


def test_workload_environment_note_and_definitions_are_printed(page) -> None:
    text = page(*comparison(concurrencies=(4,), count=12)).text
    text = text.replace("\N{MINUS SIGN}", "-").replace("\N{MULTIPLICATION SIGN}", "x")
    for expected in ("9f2c" * 16, "mean 61.3, min 8, max 512", "Some CPU", "24.00 GiB", MODEL_NOTE):
        assert expected in text
    for formula in (
        "÷ (output tokens - 1)",
        "1 - useful tokens ÷ computed tokens",
        "1 - tokens held ÷ (blocks held x block size)",
        "E2E - inference time",
        "every row put through the model, padding included",
        "time of the first chunk with a token - time sent",
        "÷ tokens in the later chunk",
    ):
        assert formula in text


def test_without_dynamic_the_first_batcher_is_the_baseline(page) -> None:
    results, requests = comparison(("static", "continuous"), (4,), count=12)
    shown = page(results, requests)
    assert "useful tokens/s of static" in shown.text
    assert shown.rows_of("static", 10)[0][2] == "baseline"


def test_failures_take_the_ratios_away_and_are_listed(page) -> None:
    results, requests = comparison(concurrencies=(16,), count=24)
    fail(run_of(results, "iterative"), requests, 5, "queue is full: <b>64</b> requests wait")
    shown = page(results, requests)
    row = shown.rows_of("iterative", 11)[0]
    assert (row[2], row[5], row[7]) == ("—", "—", "—")
    assert row[6].endswith("max of 19")
    assert row[10] == "5 of 24"
    assert ["iterative", "16", "5", "queue is full: <b>64</b> requests wait"] in shown.rows
    assert "5 failed requests" in shown.text
    assert shown.rows_of("continuous", 11)[0][2].endswith("x")


def test_differences_in_quality_are_listed_up_to_a_limit(page) -> None:
    results, requests = comparison(concurrencies=(4,), count=12)
    different = [{"request": f"continuous-{i}", "reference": f"static-{i}", "first_difference": i} for i in range(30)]
    results["quality"] |= {"equal": False, "different": different}
    shown = page(results, requests)
    assert ["request", "reference", "first_difference"] in shown.rows
    assert ["continuous-19", "static-19", "19"] in shown.rows
    assert ["continuous-20", "static-20", "20"] not in shown.rows
    assert "30 of 36 comparisons differ" in shown.text


@pytest.mark.parametrize("batchers", [("dynamic",), ("static", "dynamic", "iterative", "continuous")])
def test_a_report_in_which_every_request_failed_has_no_figures_and_no_error(page, batchers: tuple[str, ...]) -> None:
    results, requests = comparison(batchers, (1, 4), count=6)
    for run in results["runs"]:
        fail(run, requests, 6, "engine is down")
    results["quality"] = {"equal": None, "compared": 0, "different": []}
    shown = page(results, requests)
    assert "failed" in headline(results, requests)
    row = shown.rows_of("dynamic", 11)[0]
    assert (row[4], row[6], row[8], row[9]) == ("—", "—", "—", "—")
    assert "no stream" not in "".join(row)
    assert row[10] == "6 of 6"
    assert "Answers were not compared" in shown.text


def test_one_batcher_alone_is_reported_and_compared_with_nothing(page) -> None:
    shown = page(*comparison(("continuous",), (4,), count=12))
    assert "nothing else ran beside it" in shown.text
    assert len(shown.rows_of("continuous", 11)) == 1


def test_a_comparison_without_a_run_says_so(page) -> None:
    results, _ = comparison((), (1,), count=4)
    shown = page(results | {"interrupted": True}, [])
    assert "Nothing was measured." in shown.text
    assert "Interrupted" in shown.text


def test_markup_in_the_data_stays_text(page) -> None:
    evil = "<script>alert(1)</script>"
    results, requests = comparison((evil, "dynamic"), (1, 2), count=6)
    results["environment"][evil] = f'"{evil}'
    results["environment"]["model_note"] = evil
    results["workload"]["name"] = evil
    results["quality"] |= {"equal": False, "different": [evil, {evil: evil}]}
    fail(results["runs"][0], requests, 1, f"'\">{evil}")
    shown = page(results, requests)
    assert "<script" not in shown.html
    assert shown.text.count(evil) > 10
    values = [pair for tag, attributes in shown.tags if tag != "svg" for pair in attributes.items()]
    assert not [pair for pair in values if evil in pair]


def test_a_report_needs_no_statistic_that_the_server_did_not_give(page) -> None:
    results, requests = comparison(concurrencies=(4,), count=12)
    unknown = ("useful_tokens", "computed_tokens", "padding_fraction", "kv_waste_fraction", "kv_peak_blocks")
    for run in results["runs"]:
        run |= dict.fromkeys((*unknown, "preemptions", "cpu_percent", "rss_bytes", "triton_executions"))
    shown = page(results, requests)
    assert shown.rows_of("continuous", 7)[0][1:5] == ["—"] * 4
    for run in results["runs"]:
        run |= {"gpu_utilization": 0.5, "gpu_memory_bytes": 3 * 2**30}
    assert page(results, requests).rows_of("continuous", 8)[0][5:7] == ["50.0%", "3.00 GiB"]
