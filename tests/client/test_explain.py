"""The explain bars: their lengths and parts, their labels, and the reasons in words."""

from __future__ import annotations

import pytest

from simulated_comparison import comparison, runs_of
from slipstream_client.report.explain import (
    ENGINE_TIME,
    REQUEST_TIME,
    SLOTS,
    Bars,
    engine_time_bars,
    larger_steps,
    request_time_bars,
    slot_bars,
    slots_reason,
    time_reason,
    unexplained,
)
from slipstream_client.report.formats import whole_percents
from slipstream_client.report.study import Cell, Study

SLOTS_OF = {
    "dynamic": {
        "useful_decode": 200,
        "useful_prefill": 300,
        "prompt_padding": 100,
        "finished_rows": 380,
        "recomputed": 0,
    },
    "continuous": {
        "useful_decode": 200,
        "useful_prefill": 300,
        "prompt_padding": 0,
        "finished_rows": 0,
        "recomputed": 20,
    },
}


@pytest.fixture
def cells() -> list[Cell]:
    """Two variants, each with one run, whose parts are round numbers."""
    results, requests, steps = comparison(("dynamic", "continuous"), ("c4",), count=6, repeats=1)
    for run in results["runs"]:
        parts = SLOTS_OF[run["variant"]]
        known = sum(parts.values())
        run["slots"] = parts | {"unexplained": 1000 - known if run["variant"] == "dynamic" else 0}
        run["slots"]["total"] = sum(run["slots"].values())
        time = dict.fromkeys((part.key for part in REQUEST_TIME), 0.0)
        time |= {"prefill": 100.0, "decode": 300.0} | ({"held": 500.0} if run["variant"] == "dynamic" else {})
        run["request_time_ms"] = time | {"total": sum(time.values())}
        spent = {"useful": 6.0, "wasted": 1.0, "scheduling": 1.5, "messages": 0.5, "idle": 0.9, "unexplained": 0.1}
        run["engine_time_s"] = spent | {"total": 10.0}
    study = Study(results, requests, steps)
    return study.cells("mixed", study.families[0].loads[0])


def parts_of(bars: Bars, row: int) -> dict[str, float]:
    return {segment.part.key: segment.value for segment in bars.bars[row].segments}


def test_slots_are_for_each_useful_token(cells: list[Cell]) -> None:
    bars = slot_bars(cells)
    assert [bar.total for bar in bars.bars] == [2.0, pytest.approx(1.04)]
    expected = {"useful_decode": 0.4, "useful_prefill": 0.6, "prompt_padding": 0.2, "finished_rows": 0.76}
    assert parts_of(bars, 0) == pytest.approx(expected | {"unexplained": 0.04})
    assert parts_of(bars, 1) == pytest.approx({"useful_decode": 0.4, "useful_prefill": 0.6, "recomputed": 0.04})
    assert [segment.width for segment in bars.bars[0].segments] == pytest.approx([20, 30, 10, 38, 2])
    assert bars.bars[0].segments[3].share == pytest.approx(0.38)
    assert bars.bars[0].segments[3].tip == (
        "dynamic: finished answers that the batch went on computing: 38.0%, 380 token-slots a run"
    )


def test_lengths_compare_across_variants_and_only_parts_that_are_there_have_a_legend(cells: list[Cell]) -> None:
    bars = request_time_bars(cells)
    assert [sum(segment.width for segment in bar.segments) for bar in bars.bars] == pytest.approx([100, 400 / 9])
    assert [part.key for part in bars.parts] == ["prefill", "decode", "held"]
    assert [segment.text for segment in bars.bars[0].segments] == ["100 ms", "300 ms", "500 ms"]


def test_the_engine_s_time_is_drawn_in_seconds_on_one_scale(cells: list[Cell]) -> None:
    cells[1].runs[0]["engine_time_s"] = {"useful": 4.0, "idle": 1.0, "total": 5.0}
    bars = engine_time_bars(cells)
    assert parts_of(bars, 0)["unexplained"] == pytest.approx(0.1)
    assert [bar.total for bar in bars.bars] == [10.0, 5.0]
    assert [sum(segment.width for segment in bar.segments) for bar in bars.bars] == pytest.approx([100.0, 50.0])
    assert bars.bars[0].segments[0].text == "6 s"


def test_that_rows_cost_less_in_larger_steps_is_told_only_where_it_is_so(cells: list[Cell]) -> None:
    study = Study({"runs": [], "plan": {}}, [], [{"run": cell.runs[0]["id"]} for cell in cells for _ in range(10)])
    for cell, useful in zip(cells, (6.0, 5.0), strict=True):
        cell.runs[0]["engine_time_s"] = {"useful": useful, "wasted": 0.0, "total": useful}
    assert larger_steps(study, cells) == (  # 1000 rows in 6 s against 520 in 5 s, in 10 steps each
        "dynamic computed 1.92x the token-slots of continuous in 1.20x the computing time: its steps are larger "
        "(100 rows on average against 52), and in a larger step a row costs less."
    )
    cells[0].runs[0]["engine_time_s"]["useful"] = 9.6  # as much a row
    assert larger_steps(study, cells) == ""


def test_repeats_are_averaged() -> None:
    results, requests, steps = comparison(("dynamic", "continuous"), ("c4",), count=6)
    for number, run in enumerate(runs_of(results, "continuous", "c4")):
        run["request_time_ms"] = {part.key: 0.0 for part in REQUEST_TIME} | {
            "decode": 100.0 + number,
            "total": 100.0 + number,
        }
    study = Study(results, requests, steps)
    bars = request_time_bars(study.cells("mixed", study.families[0].loads[0]))
    assert parts_of(bars, 1) == {"decode": 100.5}


def test_variants_without_their_parts_have_no_bar(cells: list[Cell]) -> None:
    cells[0].runs[0]["slots"] = None
    assert [bar.cell.variant for bar in slot_bars(cells).bars] == ["continuous"]
    cells[1].runs[0]["slots"] = None
    assert slot_bars(cells).bars == []


def test_more_than_two_per_cent_unexplained_is_told(cells: list[Cell]) -> None:
    assert unexplained(cells) == []  # exactly 2 % of the slots of one
    cells[0].runs[0]["slots"]["unexplained"] = 21
    cells[1].runs[0]["request_time_ms"]["unexplained"] = 40.0
    assert unexplained(cells) == [
        "2.1% of token-slots of dynamic at 4 clients (mixed) is unexplained",
        "10.0% of an average request's time of continuous at 4 clients (mixed) is unexplained",
    ]


def test_the_reasons_name_what_differs_and_nothing_small(cells: list[Cell]) -> None:
    dynamic, continuous = cells
    assert slots_reason(continuous, dynamic) == (
        "96% of what the model computed for continuous was useful, but only 50% of what it computed for dynamic: "
        "38% went to answers already finished and 10% went to prompt padding"
    )
    assert time_reason(continuous, dynamic) == (
        "an average request of dynamic spends 500 ms held for the batch's longest answer (against none)"
    )
    dynamic.runs[0]["request_time_ms"] |= {"triton_queue": 260.0, "total": 1160.0}
    assert time_reason(continuous, dynamic) == (
        "an average request of dynamic spends 500 ms held for the batch's longest answer (against none) and "
        "360 ms waiting and reading the prompt, mostly in Triton's queue (against 100 ms)"
    )
    assert slots_reason(dynamic, continuous) is None
    assert time_reason(dynamic, continuous) is None


def test_rounded_shares_of_one_whole_add_up_to_it() -> None:
    assert whole_percents([0.586, 0.217, 0.197]) == ["58%", "22%", "20%"]
    assert whole_percents([1.0, 0.0]) == ["100%", "0%"]
    assert whole_percents([1 / 3, 1 / 3, 1 / 3]) == ["34%", "33%", "33%"]


def test_every_part_has_its_own_look_and_name_and_labels_that_can_be_read() -> None:
    def luminance(colour: str) -> float:
        channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for parts in (SLOTS, REQUEST_TIME, ENGINE_TIME):
        for name in ("key", "fill", "legend", "label"):
            assert len({getattr(part, name) for part in parts}) == len(parts), name
        for part in parts:
            low, high = sorted((luminance(part.fill), luminance(part.ink)))
            assert (high + 0.05) / (low + 0.05) >= 4.5, part.key
