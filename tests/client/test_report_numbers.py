"""What the report states follows from requests.jsonl and steps.jsonl: picked from the page, computed again."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from report_page import Page, write_page
from simulated_comparison import SLO, comparison

SEEDS = (0, 1, 2)
VARIANTS = ("static", "dynamic", "iterative", "continuous")
POINTS = ("c4", "c16", "r2")
COUNT, REPEATS = 40, 3


class Records:
    """The files of a comparison, and nothing of results.json."""

    def __init__(self, requests: list[dict[str, Any]], steps: list[dict[str, Any]]) -> None:
        self._requests, self._steps = requests, steps

    def measured(self, variant: str, point: str, repeat: int) -> list[dict[str, Any]]:
        run = f"{variant}/mixed/{point}/{repeat}"
        return [r for r in self._requests if r["run"] == run and r["phase"] == "measured"]

    def steps(self, variant: str, point: str, repeat: int) -> list[dict[str, Any]]:
        return [step for step in self._steps if step["run"] == f"{variant}/mixed/{point}/{repeat}"]

    def mean(self, variant: str, point: str, figure: Callable[[Sequence[dict[str, Any]]], float]) -> float:
        """A figure's mean over the repeats."""
        return statistics.fmean(figure(self.measured(variant, point, repeat)) for repeat in range(REPEATS))


def duration(records: Sequence[dict[str, Any]]) -> float:
    return max(r["last"] for r in records) - min(r["sent"] for r in records)


def rate(records: Sequence[dict[str, Any]]) -> float:
    return sum(r["output_tokens"] for r in records) / duration(records)


def e2e(records: Sequence[dict[str, Any]]) -> list[float]:
    return [(r["last"] - r["sent"]) * 1000 for r in records]


def ttft(records: Sequence[dict[str, Any]]) -> list[float]:
    return [(r["first"] - r["sent"]) * 1000 for r in records]


def p99(values: list[float]) -> float:
    return float(np.percentile(values, 99))


def within(record: dict[str, Any], slo: str) -> bool:
    limits = SLO[slo]
    whole = (record["last"] - record["sent"]) * 1000
    first = whole if record["first"] is None else (record["first"] - record["sent"]) * 1000
    token = 0.0
    if record["first"] is not None and record["output_tokens"] > 1:
        token = (record["last"] - record["first"]) * 1000 / (record["output_tokens"] - 1)
    pairs = zip((first, token, whole), (limits["ttft"], limits["tpot"], limits["e2e"]), strict=True)
    return all(limit is None or value <= limit for value, limit in pairs)


@pytest.fixture(scope="module", params=SEEDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Page, Records]:
    """A page, and the lines that it must follow from, through the files."""
    results, requests, steps = comparison(VARIANTS, POINTS, count=COUNT, repeats=REPEATS, seed=request.param)
    page = write_page(tmp_path_factory.mktemp("report"), results, requests, steps)
    requests, steps = ([json.loads(json.dumps(line)) for line in lines] for lines in (requests, steps))
    return page, Records(requests, steps)


def test_throughput_latency_tails_and_goodput(made: tuple[Page, Records]) -> None:
    page, records = made
    for variant in VARIANTS:
        for point in POINTS:
            row = {"variant": variant, "point": point, "workload": "mixed"}
            expected = {
                "output_tokens_per_s": records.mean(variant, point, rate),
                "requests_per_s": records.mean(variant, point, lambda rows: len(rows) / duration(rows)),
                "e2e_mean_ms": records.mean(variant, point, lambda rows: statistics.fmean(e2e(rows))),
                "tail e2e_ms": records.mean(variant, point, lambda rows: p99(e2e(rows))),
                "failed": 0,
            }
            if variant in ("iterative", "continuous"):
                expected["ttft_mean_ms"] = records.mean(variant, point, lambda rows: statistics.fmean(ttft(rows)))
                expected["tail ttft_ms"] = records.mean(variant, point, lambda rows: p99(ttft(rows)))
            for slo in SLO:
                expected[f"goodput {slo}"] = records.mean(
                    variant, point, lambda rows, slo=slo: sum(within(r, slo) for r in rows) / duration(rows)
                )
            for key, value in expected.items():
                assert page.value(key, **row) == pytest.approx(value), (key, row)


def test_ratios_to_the_baseline(made: tuple[Page, Records]) -> None:
    page, records = made
    for point in POINTS:
        for variant in ("static", "iterative", "continuous"):
            row = {"variant": variant, "point": point, "workload": "mixed"}
            for key, figure in {
                "ratio output_tokens_per_s": rate,
                "ratio e2e_mean_ms": lambda rows: statistics.fmean(e2e(rows)),
                "ratio e2e_p99_ms": lambda rows: p99(e2e(rows)),
            }.items():
                expected = records.mean(variant, point, figure) / records.mean("dynamic", point, figure)
                assert page.value(key, **row) == pytest.approx(expected), (key, row)


def test_the_numbers_as_they_are_printed(made: tuple[Page, Records]) -> None:
    page, records = made
    rows = [row for row in page.rows if row[0] == "continuous" and len(row) == 13]
    for row, point in zip(rows, POINTS, strict=True):
        rates = [rate(records.measured("continuous", point, repeat)) for repeat in range(REPEATS)]
        assert row[1].split()[0] == f"{statistics.fmean(rates):,.1f}"
        assert row[1].split()[1] == f"{min(rates) * 0.99:,.1f}–{max(rates) * 1.01:,.1f}"  # noqa: RUF001
        everything = [r for repeat in range(REPEATS) for r in records.measured("continuous", point, repeat)]
        assert row[10].split()[1] == f"{sum(within(r, 'chat') for r in everything) / len(everything) * 100:.1f}%"
        assert row[9] == f"0 of {COUNT * REPEATS}"


def test_the_headline_states_the_ratio_at_the_highest_closed_load(made: tuple[Page, Records]) -> None:
    page, records = made
    mine, base = records.mean("continuous", "c16", rate), records.mean("dynamic", "c16", rate)
    found = re.search(r"continuous delivered ([\d.]+)x the useful tokens/s of dynamic \((\d+\.?\d*) against", page.text)
    assert found
    assert float(found[1]) == pytest.approx(mine / base, rel=0.03)
    assert float(found[2]) == pytest.approx(mine, rel=0.005)


def test_token_slots_follow_from_the_steps(made: tuple[Page, Records]) -> None:
    page, records = made
    columns = {
        "useful_decode": "decode_rows",
        "useful_prefill": "prefill_rows",
        "prompt_padding": "prompt_padding_rows",
        "finished_rows": "finished_rows",
    }
    for variant in VARIANTS:
        steps = [step for repeat in range(REPEATS) for step in records.steps(variant, "c16", repeat)]
        useful = sum(step["decode_rows"] + step["prefill_rows"] for step in steps)
        total = 0.0
        for part, column in columns.items():
            expected = sum(step[column] for step in steps) / useful
            total += expected
            drawn = [each for each in page.marked(variant=variant, part=part) if "data-tip" in each]
            if not expected:
                assert drawn == []
                continue
            assert float(drawn[0]["data-value"] or "nan") == pytest.approx(expected)
        stack_total = next(t for _, t in page.tags if t.get("class") == "stack-total" and t["data-variant"] == variant)
        assert float(stack_total["data-value"] or "nan") == pytest.approx(total)


def test_the_time_of_an_average_request_follows_from_the_records(made: tuple[Page, Records]) -> None:
    page, records = made
    for variant in VARIANTS:

        def mean(name: str, variant: str = variant) -> float:
            return records.mean(variant, "c16", lambda rows: statistics.fmean(r["stats"][name] or 0 for r in rows))

        shown = {}
        for part in ("prefill", "decode", "held"):
            found = page.marked(variant=variant, part=part)
            shown[part] = float(found[0]["data-value"] or "nan") if found else 0.0
        assert shown["held"] == pytest.approx(mean("held_ms"))
        assert shown["prefill"] == pytest.approx(mean("first_token_ms") - mean("queue_ms"))
        assert shown["prefill"] + shown["decode"] == pytest.approx(mean("inference_ms"))
        totals = [t for _, t in page.tags if t.get("class") == "stack-total" and t["data-variant"] == variant]
        whole = records.mean(
            variant, "c16", lambda rows: statistics.fmean((r["last"] - r["intended"]) * 1000 for r in rows)
        )
        assert float(totals[1]["data-value"] or "nan") == pytest.approx(whole)


def test_the_parts_of_every_bar_add_up_to_its_length(made: tuple[Page, Records]) -> None:
    page, _ = made
    bars, totals = [], []
    for _, found in page.tags:
        if found.get("class") == "stack-bar":
            bars.append(0.0)
        elif "data-part" in found:
            bars[-1] += float(found["data-value"] or "nan")
        elif found.get("class") == "stack-total":
            totals.append(float(found["data-value"] or "nan"))
    assert len(bars) == len(totals) == 3 * len(VARIANTS)
    assert bars == pytest.approx(totals)


def test_occupancy_is_the_time_weighted_mean_of_the_steps(made: tuple[Page, Records]) -> None:
    page, records = made
    for variant in VARIANTS:
        steps = records.steps(variant, "c16", 0)
        lengths = [step["schedule_s"] + step["run_s"] + step["update_s"] for step in steps]
        working = [step["running"] for step in steps]
        end = steps[-1]["start_s"] + lengths[-1]
        expected = sum(rows * length for rows, length in zip(working, lengths, strict=True)) / end
        (found,) = page.marked(occupancy=variant)
        assert float(found["data-value"] or "nan") == pytest.approx(expected)


def test_the_tips_of_the_timeline_tell_the_requests(made: tuple[Page, Records]) -> None:
    page, records = made
    record = records.measured("continuous", "c16", 0)[5]
    sizes = f"request {record['index']}: {record['input_tokens']} tokens in, {record['output_tokens']} out"
    tips = [tip for tip in page.tips if tip.startswith(sizes)]
    assert len(tips) == 4  # one a variant
    prefill = record["stats"]["first_token_ms"] - record["stats"]["queue_ms"]
    shown = re.search(r"reading the prompt ([\d.]+) (ms|s)", tips[-1])
    assert shown
    assert float(shown[1]) * (1000 if shown[2] == "s" else 1) == pytest.approx(prefill, rel=0.01)


def test_lengths_as_served(made: tuple[Page, Records]) -> None:
    page, records = made
    tokens = [r["output_tokens"] for r in records.measured("static", "c16", 0)]
    expected = [f"{statistics.fmean(tokens):.1f}", str(min(tokens)), f"{statistics.median(tokens):.0f}"]
    (row,) = [row for row in page.rows if row[:2] == ["mixed", "output tokens"]]
    assert row[2:5] == expected
    assert row[5] == f"{np.percentile(tokens, 90):.0f}"
    assert row[6:8] == [str(max(tokens)), f"{sum(tokens):,}"]
