"""The report: says what the data says, and no more; loads nothing; escapes everything; fits whatever was measured."""

from __future__ import annotations

import re
from pathlib import Path

import html5lib
import pytest

from report_page import Page, write_page
from simulated_comparison import MODEL_NOTE, comparison, conclude, fail, runs_of
from slipstream_client.comparison.statistics import summarise_runs
from slipstream_client.load.records import RequestRecord
from slipstream_client.report.csv_file import write_requests_csv
from slipstream_client.report.study import Study

RESULT_COLUMNS = 13


@pytest.fixture
def page(tmp_path: Path):
    """Writes a report and reads it."""
    return lambda results, requests, steps, changes=None: write_page(tmp_path, results, requests, steps, changes)


def test_the_page_loads_nothing_and_has_no_script(page, tmp_path: Path) -> None:
    shown: Page = page(*comparison(workloads=("mixed", "variance:0", "variance:1")))
    assert not {"script", "link", "iframe", "object", "img"} & {tag for tag, _ in shown.tags}
    urls = [v for _, found in shown.tags for k, v in found.items() if k in ("src", "srcset", "href", "action")]
    assert urls
    assert all(url.startswith("#") for url in urls if url)
    assert "url(" not in shown.html
    assert "@import" not in shown.html
    assert not [k for _, found in shown.tags for k in found if k.startswith("on")]
    policy = {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"}
    assert ("meta", policy) in shown.tags
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in shown.tags
    assert (tmp_path / "report.html").stat().st_size < 1_000_000


def test_the_page_is_valid_html(page) -> None:
    results, requests, steps = comparison()
    fail(results, requests, runs_of(results, "static"), 3, "queue is full")
    html5lib.HTMLParser(strict=True).parse(page(results, requests, steps).html)


def test_every_link_within_the_page_has_its_target(page) -> None:
    shown: Page = page(*comparison())
    ids = [found["id"] for _, found in shown.tags if "id" in found]
    assert len(set(ids)) == len(ids)
    targets = [found["href"][1:] for tag, found in shown.tags if tag == "a" and found["href"]]
    assert len(targets) == 8
    assert set(targets) <= set(ids)


def test_the_table_has_each_figure_with_its_ratio_interval_and_span(page) -> None:
    results, requests, steps = comparison()
    shown = page(results, requests, steps)
    row = shown.rows_of("continuous", RESULT_COLUMNS)[2]
    rates = [run["output_tokens_per_s"] for run in runs_of(results, "continuous")]
    compared = next(c for c in results["comparisons"] if (c["variant"], c["point"]) == ("continuous", "c16"))
    gain = compared["metrics"]["output_tokens_per_s"]
    assert row[1] == f"{sum(rates) / 2:.1f} {min(rates) * 0.99:.1f}–{max(rates) * 1.01:.1f}"  # noqa: RUF001
    assert row[2] == f"{gain['ratio']:.1f}x {gain['low']:.2f}–{gain['high']:.2f}"  # noqa: RUF001
    assert row[9] == "0 of 48"
    baseline = shown.rows_of("dynamic", RESULT_COLUMNS - 1)[2]
    assert baseline[2] == "baseline"
    assert baseline[7] == "no stream"


def test_a_difference_inside_the_noise_is_called_the_same(page) -> None:
    results, requests, steps = comparison(points=("c1",))
    same = results["comparisons"][-1]["metrics"]["output_tokens_per_s"]
    assert same["verdict"] == "same"
    shown = page(results, requests, steps)
    assert shown.rows_of("continuous", RESULT_COLUMNS)[0][2] == f"same {same['ratio']:.2f}x"


def test_fewer_than_a_hundred_requests_have_a_largest_and_no_p99(page) -> None:
    results, requests, steps = comparison(("dynamic", "continuous"), ("c16",))
    shown = page(results, requests, steps)
    longest = max(
        r["last"] - r["sent"] for r in requests if r["run"].startswith("continuous") and r["phase"] == "measured"
    )
    row = shown.rows_of("continuous", RESULT_COLUMNS)[0]
    assert row[5] == f"{longest * 1000:,.0f}"
    assert row[6] == "—"
    assert not [row for row in shown.rows if row[3:4] == ["P99 end-to-end latency"]]
    assert "tail: max of 48 requests" in shown.text
    shown = page(*comparison(("dynamic", "continuous"), ("c16",), count=50))
    assert "tail: P99" in shown.text
    assert [row[0] for row in shown.rows if row[3:4] == ["P99 end-to-end latency"]] == ["continuous"]
    assert re.fullmatch(r"0\.\d\dx 0\.\d\d–0\.\d\d", shown.rows_of("continuous", RESULT_COLUMNS)[0][6])  # noqa: RUF001


def test_with_one_repeat_every_ratio_says_that_the_noise_is_not_known(page) -> None:
    results, requests, steps = comparison(("dynamic", "continuous"), ("c16",), repeats=1)
    shown = page(results, requests, steps)
    assert shown.rows_of("continuous", RESULT_COLUMNS)[0][2].endswith(" ?")
    assert "the noise is not known and small differences mean nothing" in shown.text
    assert "noise floor" not in shown.text.partition("Definitions")[0]


def test_without_step_records_and_parts_the_page_says_that_they_are_not_known(page) -> None:
    results, requests, _ = comparison(points=("c4",))
    for run in results["runs"]:
        unknown = ("slots", "engine_time_s", "request_time_ms", "useful_tokens", "computed_tokens", "padding_fraction")
        run |= dict.fromkeys((*unknown, "kv_waste_fraction", "kv_peak_blocks", "preemptions", "cpu_percent"))
        run |= dict.fromkeys(("rss_bytes", "triton_executions", "triton_inferences", "clock_offset_s", "client_lag_ms"))
    results |= {"tuning": None, "noise": {}, "knees": {}, "command": []}
    shown = page(results, requests, [])
    assert "Not known: the engines' step records were not read" in shown.text
    assert "No step records" in shown.text
    assert "The first 27 requests" in shown.text
    assert "Why:" not in shown.text
    for run in results["runs"]:
        run |= {"gpu_utilization": 0.5, "gpu_memory_bytes": 3 * 2**30}
    assert page(results, requests, []).rows_of("continuous", 10)[0][7:9] == ["50.0%", "3.00 GiB"]


def test_a_server_that_tells_no_times_still_has_a_timeline(page) -> None:
    results, requests, _ = comparison(("dynamic", "continuous"), ("c4",), count=6)
    for record in requests:
        record["stats"] = None
    assert "waiting and reading the prompt" in page(results, requests, []).text


def test_failures_take_the_ratios_and_the_winners_away_and_are_listed(page) -> None:
    results, requests, steps = comparison(points=("c16",))
    fail(results, requests, runs_of(results, "iterative"), 5, "queue is full: <b>64</b> requests wait")
    shown = page(results, requests, steps)
    row = shown.rows_of("iterative", RESULT_COLUMNS)[0]
    assert (row[2], row[4], row[6]) == ("—", "—", "—")
    assert row[9] == "10 of 48 10 refusals"
    assert ["iterative", "mixed", "c16", "10", "UNAVAILABLE", "queue is full: <b>64</b> requests wait"] in shown.rows
    assert "10 failed requests (10 refused, 0 cancelled, 0 empty)" in shown.text
    assert shown.text.count("No winner is named: 10 of 48 requests of iterative failed at 16 clients.") == 2
    assert "x " in shown.rows_of("continuous", RESULT_COLUMNS)[0][2]


def test_an_invalid_point_says_why_and_names_no_winner(page) -> None:
    results, requests, steps = comparison(points=("c16",))
    for run in runs_of(results, "continuous"):
        run |= {"valid": False, "invalid_because": ["the generator fell 140 ms behind"]}
    shown = page(results, requests, steps)
    assert "continuous at 16 clients: invalid: the generator fell 140 ms behind" in shown.text
    assert shown.text.count("No winner is named") == 3
    assert "Cannot say how continuous compares with dynamic at 16 clients: the point of continuous" in shown.text
    assert "Not filled: requests failed, or the point is invalid." in shown.text


def test_differences_in_quality_are_listed_up_to_a_limit(page) -> None:
    results, requests, steps = comparison(points=("c4",), count=12)
    different = [{"request": f"continuous-{i}", "reference": f"static-{i}", "first_difference": i} for i in range(30)]
    results["quality"] |= {"equal": False, "different": different}
    shown = page(results, requests, steps)
    assert ["request", "reference", "first_difference"] in shown.rows
    assert ["continuous-19", "static-19", "19"] in shown.rows
    assert ["continuous-20", "static-20", "20"] not in shown.rows
    assert f"30 of {results['quality']['compared']} comparisons differ" in shown.text
    assert shown.text.count("No winner is named: the batchers gave different answers.") == 3


@pytest.mark.parametrize("variants", [("dynamic",), ("static", "dynamic", "iterative", "continuous")])
def test_a_report_in_which_every_request_failed_has_no_figures_and_no_error(page, variants: tuple[str, ...]) -> None:
    results, requests, steps = comparison(variants, ("c4", "c16"), count=6)
    for run in results["runs"]:
        fail(results, requests, [run], 6, "engine is down")
    results["quality"] = {"equal": None, "compared": 0, "different": []}
    shown = page(results, requests, steps)
    row = shown.rows_of("dynamic", RESULT_COLUMNS)[0]
    assert (row[1], row[3], row[5], row[7], row[8]) == ("—", "—", "—", "—", "—")
    assert row[9] == "12 of 12 12 refusals"
    assert "Answers were not compared" in shown.text


def test_one_variant_alone_is_reported_and_compared_with_nothing(page) -> None:
    shown = page(*comparison(("continuous",), ("c4",), count=12))
    assert "nothing else ran beside it" in shown.text
    assert "How sure:" not in shown.text
    assert len(shown.rows_of("continuous", RESULT_COLUMNS)) == 1


def test_a_comparison_without_a_run_says_so(page) -> None:
    results, _, _ = comparison((), ("c1",), count=4)
    shown = page(results | {"interrupted": True}, [], [])
    assert "Nothing was measured." in shown.text
    assert "Interrupted: only the runs that were complete are here." in shown.text


def test_an_interrupted_comparison_shows_the_runs_that_it_has(page) -> None:
    results, requests, steps = comparison(points=("c4", "c16"), count=12)
    results["runs"] = results["runs"][:6]
    conclude(results, requests)
    shown = page(results | {"interrupted": True}, requests, steps)
    assert "Interrupted" in shown.text
    assert len(shown.rows_of("continuous", RESULT_COLUMNS)) == 1


def test_markup_in_the_data_stays_text(page) -> None:
    evil = "<script>alert(1)</script>"
    results, requests, steps = comparison((evil, "dynamic"), ("c1", "c2", "c4"), (evil,), count=6)
    results["environment"][evil] = f'"{evil}'
    results["environment"]["model_note"] = evil
    results["command"] = [evil]
    results["plan"]["slo"] = {evil: {"ttft": 1.0, "tpot": None, "e2e": None}}
    results["quality"] |= {"equal": False, "different": [evil, {evil: evil}]}
    fail(results, requests, [results["runs"][0]], 1, f"'\">{evil}")
    results["runs"][1] |= {"valid": False, "invalid_because": [evil]}
    shown = page(results, requests, steps)
    assert "<script" not in shown.html
    assert shown.text.count(evil) > 10
    for name in ("class", "style", "id", "href"):
        assert not [found for _, found in shown.tags if evil in (found.get(name) or "")]


def test_workload_environment_command_and_definitions_are_printed(page) -> None:
    results, requests, steps = comparison(points=("c4",), count=12)
    text = page(results, requests, steps).text
    text = text.replace("\N{MINUS SIGN}", "-").replace("\N{MULTIPLICATION SIGN}", "x")
    told = (
        "9f2c" * 16,
        "00ab" * 16,
        "Some CPU",
        "24.00 GiB",
        MODEL_NOTE,
        "slipstream compare --batchers static,dynamic",
    )
    for expected in told:
        assert expected in text
    for formula in (
        "÷ (output tokens - 1), for each request that has more than one",
        "1 - tokens held ÷ (blocks held x block size)",
        "E2E - inference time",
        "time of the first chunk with a token - time sent",
        "÷ tokens in the later chunk",
        "requests within the target ÷ requests sent",
        "standard deviation of the output lengths ÷ their mean",
        "token-slots ÷ (useful decode + useful prefill)",
    ):
        assert formula in text


def test_what_the_csv_and_the_knees_name_is_explained(page, tmp_path: Path) -> None:
    results, requests, steps = comparison(count=12)
    shown = page(results, requests, steps)
    table = write_requests_csv(Study(results, requests, steps), tmp_path / "requests.csv")
    columns = table.read_text().splitlines()[0].split(",")
    times = [name for name in columns if name in ("intended", "sent", "first", "last") or name.endswith("_ms")]
    assert len(times) == 14
    assert [name for name in times if f"<code>{name}</code>" not in shown.html] == []
    target = "target “chat” (first token within 2 s, 200 ms for each further token): last load that surely keeps it"
    assert target in [cell for row in shown.rows for cell in row]
    assert "the attainment of the first target is surely at least 90%" in shown.text
    assert "Bayesian information criterion, BIC" in shown.text


def test_the_tuning_grid_shows_what_was_tried_and_what_was_chosen(page) -> None:
    shown = page(*comparison(("dynamic", "continuous"), ("c4",), count=6))
    assert ["5 ms", "16", "64.0", "14.9", "0"] in shown.rows
    assert ["50 ms", "16", "61.0", "15.2", "0"] in shown.rows
    assert len([found for tag, found in shown.tags if tag == "tr" and found.get("class") == "chosen"]) == 1


def test_a_dynamic_batcher_that_formed_no_batch_is_shown_to_be_none(page) -> None:
    """DYN-05."""
    results, requests, steps = comparison(("dynamic", "continuous"), ("c16",), count=12)
    for run in runs_of(results, "dynamic"):
        run["triton_executions"] = run["triton_inferences"]
    doubt = "dynamic at 16 clients (mixed): Triton's dynamic batcher did not batch (30 requests in 30 executions)"
    shown = page(results, requests, steps)
    assert shown.text.count(f"{doubt}, so this shows nothing of dynamic batching") >= 2
    assert "No winner is named: dynamic at 16 clients" in shown.text


def test_every_chart_of_a_sweep_of_loads_is_there(page) -> None:
    shown: Page = page(*comparison(points=("c1", "c4", "c16"), workloads=("mixed", "variance:0", "variance:1")))
    charts = [found["data-chart"] for _, found in shown.tags if "data-chart" in found]
    expected = ["throughput", "tradeoff", "e2e_ms", "ttft_ms", "goodput chat", "goodput whole", "cdf ttft", "cdf e2e"]
    assert charts == [*expected, "sweep"]
    assert "throughput knee of continuous: " in " ".join(shown.tips)
    assert "target “chat”" in shown.html


def test_answers_of_another_executor_are_compared_with_the_native_ones(page) -> None:
    results, requests, steps = comparison(("dynamic", "dynamic (transformers)"), ("c4",), count=6)
    different = [
        {"request": "a", "reference": "b", "first_difference": 3, "margin": margin} for margin in (0.02, None, 0.3)
    ]
    results["quality"]["agreement"] = {"dynamic (transformers)": {"compared": 24, "agree": 21, "different": different}}
    shown = page(results, requests, steps)
    assert ["dynamic (transformers)", "21", "24", "0.30"] in shown.rows
    assert "dynamic (transformers) was slower" in shown.text


def test_every_metric_stands_against_the_baseline_with_its_superiority(page) -> None:
    results, requests, steps = comparison(("dynamic", "continuous"), ("c4",), count=6)
    found = results["comparisons"][0]["metrics"]["e2e_mean_ms"]
    found["superiority"] = 0.871
    shown = page(results, requests, steps)
    (row,) = [row for row in shown.rows if row[3:4] == ["mean end-to-end latency"]]
    assert row[4:7] == [f"{found['value']:,.1f}", f"{found['base']:,.1f}", f"{found['ratio']:.3f}"]
    assert row[10] == "87%"


def test_a_rate_without_an_end_and_a_trace_are_loads_too(page) -> None:
    results, requests, steps = comparison(("dynamic", "continuous"), ("r1", "r2"), count=6)
    for run in results["runs"]:
        run["load"] = {"r1": {"kind": "open", "rate": "inf"}, "r2": {"kind": "trace", "speed": 2.0}}[run["point"]]
    shown = page(results, requests, steps)
    assert "all requests at once" in shown.text
    assert "the trace at 2x its speed" in shown.text


def test_the_statistics_of_the_comparison_itself_are_shown(page) -> None:
    """From the records alone, as `slipstream compare` makes them."""
    results, requests, steps = comparison(points=("c2", "c4", "c8", "c16"), count=12)
    records: dict[str, list[RequestRecord]] = {}
    for line in requests:
        records.setdefault(line["run"], []).append(RequestRecord(**line))
    results |= summarise_runs(results["runs"], records, "dynamic", "chat")
    shown: Page = page(results, requests, steps)
    found = next(
        c["metrics"]["output_tokens_per_s"]
        for c in results["comparisons"]
        if (c["variant"], c["point"]) == ("continuous", "c16")
    )
    assert found["verdict"] == "better"
    assert (
        f"95% interval {found['low']:.2f}x to {found['high']:.2f}x, noise floor {found['noise'] * 100:.1f}%"
        in shown.text
    )
    (expected,) = [
        i["metrics"]["output_tokens_per_s"]
        for i in results["intervals"]
        if (i["variant"], i["point"]) == ("continuous", "c16")
    ]
    row = shown.rows_of("continuous", RESULT_COLUMNS)[3]
    assert row[1].endswith(f" {expected['low']:.1f}–{expected['high']:.1f}")  # noqa: RUF001
    assert "no knee: " in shown.text or "clients: " in shown.text


def test_runs_whose_step_records_are_not_complete_are_named(page) -> None:
    results, requests, steps = comparison(("dynamic", "continuous"), ("c4",), count=6)
    results["runs"][0]["steps_missing"] = 7
    shown = page(results, requests, steps)
    assert f"Step records are missing of {results['runs'][0]['id']}: their token-slots are not known." in shown.text
