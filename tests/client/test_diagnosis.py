"""Each rule of the diagnosis: when it speaks, what figures it states, and that it is silent otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from simulated_comparison import comparison
from slipstream_client.report.diagnosis import diagnose
from slipstream_client.report.study import Study

NO_TIME = dict.fromkeys(
    (
        *(
            "client",
            "triton_queue",
            "wait_batch",
            "wait_step",
            "wait_seats",
            "wait_blocks",
            "wait_budget",
            "wait_priority",
        ),
        *("prefill", "decode", "held", "delivery", "unexplained"),
    ),
    0.0,
)
NO_SLOTS = dict.fromkeys(
    ("useful_decode", "useful_prefill", "prompt_padding", "finished_rows", "recomputed", "unexplained"), 0
)


def found(**figures: Any) -> list[tuple[str, str]]:
    """The findings of one run, at 8 clients after 4, in which nothing is remarkable but these figures."""
    results, requests, steps = comparison(("continuous",), ("c4", "c8"), count=6, repeats=1)
    before, run = results["runs"]
    time = NO_TIME | {"decode": 1000.0 - sum(figures.get("time", {}).values())} | figures.get("time", {})
    slots = NO_SLOTS | {"useful_decode": 1000 - sum(figures.get("slots", {}).values())} | figures.get("slots", {})
    engine = {"wasted": 0.0, "scheduling": 0.0, "bookkeeping": 0.0, "messages": 0.0, "idle": 0.0} | figures.get(
        "engine", {}
    )
    run |= {
        "request_time_ms": time | {"total": 1000.0},
        "slots": slots | {"total": 1000},
        "engine_time_s": engine | {"useful": 10.0 - sum(engine.values()), "total": 10.0},
        "preemptions": figures.get("preemptions", 0),
        "kv_peak_blocks": 77,
    }
    before["output_tokens_per_s"], run["output_tokens_per_s"] = figures.get("rates", (100.0, 190.0))
    for each, mean in zip((before, run), figures.get("means", (1000.0, 1100.0)), strict=True):
        each["e2e_ms"] = dict.fromkeys(("mean", "p50", "p90", "p99"), mean)
    study = Study(results, requests, steps)
    assert study.main
    return [(finding.words, finding.figures) for finding in diagnose(study, study.main)]


def test_nothing_remarkable_has_no_finding() -> None:
    assert found() == []


@pytest.mark.parametrize(
    ("figures", "begins", "used"),
    [
        (
            {"time": {"wait_seats": 300.0}},
            "Too few seats",
            "waiting for a seat 300 ms (30%), for KV memory 0 ms (0%), no",
        ),
        ({"preemptions": 3}, "Too little KV memory", "3 preemptions, waiting for KV memory 0 ms (0%), peak 77 blocks"),
        ({"time": {"wait_blocks": 150.0}}, "Too little KV memory", "waiting for KV memory 150 ms (15%)"),
        (
            {"rates": (100.0, 102.0), "means": (1000.0, 2000.0)},
            "Saturated: from 4 clients to 8 clients",
            "tokens/s 100 to 102, mean end-to-end 1 s to 2 s",
        ),
        ({"time": {"held": 250.0}}, "Held by its longest answer", "held 250 ms (25%), 0 (0%) token-slots"),
        ({"slots": {"prompt_padding": 220}}, "Prompts of unlike lengths", "prompt padding 220 (22%) token-slots"),
        ({"slots": {"recomputed": 120}}, "Work is thrown away", "recomputed 120 (12%) token-slots"),
        ({"time": {"triton_queue": 400.0}}, "Requests queue in Triton", "in Triton's queue 400 ms (40%), 1.0 requests"),
        ({"time": {"wait_budget": 110.0}}, "The token budget", "waiting for the budget 110 ms (11%)"),
        ({"time": {"client": 120.0}}, "The wait begins at the client", "at the client 120 ms (12%)"),
        ({"engine": {"idle": 4.0}}, "Not loaded", "idle 4 s (40%)"),
        (
            {"engine": {"scheduling": 1.0, "messages": 1.5}},
            "Much of the engine's time",
            "scheduling 1 s (10%), bookkeeping 0 s (0%), messages 1.5 s (15%)",
        ),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_each_rule_states_its_figures(figures: dict[str, Any], begins: str, used: str) -> None:
    ((words, its_figures),) = found(**figures)
    assert words.startswith(begins)
    assert used in its_figures


@pytest.mark.parametrize(
    "figures",
    [
        {"time": {"wait_seats": 90.0}},
        {"time": {"wait_blocks": 90.0}},
        {"time": {"held": 190.0}},
        {"time": {"triton_queue": 190.0}},
        {"slots": {"prompt_padding": 190, "recomputed": 90}},
        {"engine": {"idle": 2.9}},
        {"rates": (100.0, 120.0), "means": (1000.0, 2000.0)},
        {"rates": (100.0, 101.0), "means": (1000.0, 1200.0)},
    ],
)
def test_below_its_threshold_a_rule_is_silent(figures: dict[str, Any]) -> None:
    assert found(**figures) == []


def test_seats_are_not_called_too_few_where_memory_is_what_lacks() -> None:
    words = [words for words, _ in found(time={"wait_seats": 300.0, "wait_blocks": 200.0})]
    assert len(words) == 1
    assert words[0].startswith("Too little KV memory")


def test_without_figures_nothing_is_said() -> None:
    results, requests, _ = comparison(("dynamic", "continuous"), ("c4",), count=6, repeats=1)
    for run in results["runs"]:
        run |= {"slots": None, "request_time_ms": None, "engine_time_s": None, "preemptions": None}
    study = Study(results, requests, [])
    assert study.main
    assert diagnose(study, study.main) == []


def test_the_simulated_batchers_get_the_diagnosis_that_they_were_built_with() -> None:
    study = Study(*comparison(points=("c16", "c32"), count=48, repeats=1))
    assert study.main
    said = {(f.variant, f.words.partition(":")[0]) for f in diagnose(study, study.main)}
    assert ("continuous", "Too few seats") in said
    assert ("dynamic", "Held by its longest answer") in said
    assert ("dynamic", "Requests queue in Triton until the batch before theirs is done.") in said
    assert ("iterative", "Prompts of unlike lengths") in said
    assert not [words for variant, words in said if variant == "continuous" and words.startswith(("Held", "Prompts"))]
