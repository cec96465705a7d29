"""The summary of a comparison: the ratio that was measured and how sure it is, or why there is none to tell."""

from __future__ import annotations

import math
import re

import pytest

from simulated_comparison import Data, comparison, conclude, fail, runs_of
from slipstream_client.report.formats import duration, listed, times
from slipstream_client.report.study import Study
from slipstream_client.report.summary import headline, how_sure, paragraph


def set_rates(data: Data, variant: str, *rates: float, point: str = "c16", workload: str = "mixed") -> None:
    """Let the repeats of one cell have delivered this much."""
    for run, rate in zip(runs_of(data[0], variant, point, workload), rates, strict=True):
        run["output_tokens_per_s"] = rate


def test_it_states_the_ratio_and_its_certainty_at_the_highest_load() -> None:
    data = comparison()
    set_rates(data, "continuous", 200.0, 210.0)
    set_rates(data, "dynamic", 66.0, 66.0)
    conclude(data[0], data[1])
    floor = math.exp(math.log(1 + data[0]["noise"]["metrics"]["output_tokens_per_s"]["floor"]) / math.sqrt(2)) - 1
    found = headline(Study(*data))
    assert found.startswith(
        "At 16 clients (workload mixed), continuous delivered 3.1x the useful tokens/s of dynamic (205 against 66; "
        f"95% interval 3.03x to 3.18x, noise floor {floor * 100:.1f}%), with "
    )
    assert found.endswith("x its mean end-to-end latency.")  # 48 requests are too few for a P99


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ((50.0, 50.0), "continuous was slower: 0.50x the useful tokens/s of dynamic (50 against 100;"),
        (
            (100.0, 100.4),
            "continuous and dynamic deliver the same useful tokens/s: no difference beyond the noise (1.00x",
        ),
    ],
)
def test_it_is_honest_when_nothing_was_gained(rates: tuple[float, float], words: str) -> None:
    data = comparison(count=12)
    set_rates(data, "dynamic", 100.0, 100.0)
    set_rates(data, "continuous", *rates)
    conclude(data[0], data[1])
    assert words in headline(Study(*data))


def test_a_large_noise_floor_is_no_equality() -> None:
    data = comparison(count=12)
    set_rates(data, "dynamic", 80.0, 120.0)
    set_rates(data, "continuous", 90.0, 125.0)
    conclude(data[0], data[1])
    found = headline(Study(*data))
    assert (
        "whether continuous delivers other useful tokens/s than dynamic cannot be told: what was seen (1.07x" in found
    )
    assert "lies within the noise, which is large" in found
    assert "the same" not in found


def test_it_says_what_is_left_where_lengths_are_equal() -> None:
    data = comparison(points=("c16",), workloads=("mixed", "variance:0", "variance:1"))
    said = " ".join(paragraph(Study(*data)))
    assert (
        "Where all answers are equally long (variance:0, at 16 clients) there is no difference beyond the noise" in said
    )
    for run in runs_of(data[0], "continuous", "c16", "variance:0"):
        run["output_tokens_per_s"] *= 1.2
    conclude(data[0], data[1])
    gain = next(
        c["metrics"]["output_tokens_per_s"]
        for c in data[0]["comparisons"]
        if (c["variant"], c["workload"]) == ("continuous", "variance:0")
    )
    said = " ".join(paragraph(Study(*data)))
    interval = f"{gain['low']:.2f}x to {gain['high']:.2f}x"
    assert f"continuous delivers {gain['ratio']:.2f}x as much ({interval}), a small gain." in said


def test_it_gives_the_reason_from_slots_and_time() -> None:
    study = Study(*comparison())
    cell = study.cell("mixed", study.families[0].loads[-1], "dynamic")
    assert cell
    slots = cell.parts("slots")
    assert slots
    useful = (slots["useful_decode"] + slots["useful_prefill"]) / slots["total"]
    said = " ".join(paragraph(study))
    assert f"100% of what the model computed for continuous was useful, but only {useful * 100:.0f}% of what" in said
    assert f"{slots['finished_rows'] / slots['total'] * 100:.0f}% went to answers already finished" in said
    assert "held for the batch's longest answer (against none)" in said


def test_it_cannot_say_where_requests_failed_answers_differ_or_the_point_is_invalid() -> None:
    data = comparison(count=12)
    results, requests, _ = data
    results["quality"] |= {"equal": False, "different": [{"request": "a", "reference": "b", "first_difference": 3}]}
    cannot = "Cannot say how continuous compares with dynamic at 16 clients: "
    compared = results["quality"]["compared"]
    assert headline(Study(*data)) == (f"{cannot}the batchers gave different answers (1 of {compared} comparisons).")
    fail(results, requests, runs_of(results, "dynamic")[:1], 5, "queue is full")
    assert headline(Study(*data)) == f"{cannot}5 of 24 requests of dynamic failed at 16 clients."
    runs_of(results, "continuous")[1].update(valid=False, invalid_because=["the client fell behind"])
    assert headline(Study(*data)) == (
        f"{cannot}the point of continuous at 16 clients is invalid (the client fell behind) and "
        "5 of 24 requests of dynamic failed at 16 clients."
    )


def test_it_says_when_answers_were_not_compared() -> None:
    data = comparison(count=12)
    data[0]["quality"] = {"equal": None, "compared": 0, "different": []}
    assert "equal work is assumed, not shown" in paragraph(Study(*data))[-1]


def test_it_says_how_sure_it_is() -> None:
    data = comparison(count=12)
    data[0]["noise"]["metrics"] = {"output_tokens_per_s": {"floor": 0.0314, "degrees_of_freedom": 9}}
    assert (
        "The noise floor is 2.2% in tokens/s: two such means of one variant differ by less in 95 of 100 cases"
        in how_sure(Study(*data))
    )
    floor = Study(*data).floor("output_tokens_per_s", 2, 8)
    assert floor == pytest.approx(1.0314**0.559017 - 1)  # sqrt((1/2 + 1/8) / 2)
    data[0]["noise"] = {}
    assert how_sure(Study(*data)) == "Each figure is the mean of 2 repeats; the noise was not measured."
    once = comparison(("dynamic", "continuous"), ("c4",), count=6, repeats=1)
    assert how_sure(Study(*once)).startswith("Each figure is of one run, so the noise is not known")
    assert "how sure is not known" in headline(Study(*once))


def test_it_claims_nothing_about_a_dynamic_batcher_that_formed_no_batch() -> None:
    """DYN-05: by the statistics of Triton itself; where they were not read, that is said as well."""
    data = comparison(("dynamic", "continuous"), ("c4",), count=12)
    assert "batch (" not in " ".join(paragraph(Study(*data)))
    for run in runs_of(data[0], "dynamic", "c4"):
        run["triton_executions"] = run["triton_inferences"]
    assert (
        "But dynamic at 4 clients (mixed): Triton's dynamic batcher did not batch (30 requests in 30 executions), "
        "so this shows nothing of dynamic batching." in paragraph(Study(*data))
    )
    for run in runs_of(data[0], "dynamic", "c4"):
        run["triton_executions"] = run["triton_inferences"] = None
    assert "whether Triton's dynamic batcher formed batches is not known" in " ".join(paragraph(Study(*data)))


def test_a_comparison_of_one_variant_or_of_none_claims_nothing() -> None:
    data = comparison(("continuous",), ("c1", "c4"), count=12)
    rate = sum(run["output_tokens_per_s"] for run in runs_of(data[0], "continuous", "c4")) / 2
    assert headline(Study(*data)).startswith(f"At 4 clients, continuous delivered {rate:.3g} useful tokens/s")
    assert "nothing else ran beside it" in headline(Study(*data))
    assert headline(Study(data[0] | {"runs": []}, [], [])) == "Nothing was measured."


def test_the_highest_load_that_both_ran_is_taken() -> None:
    data = comparison(("dynamic", "continuous"), ("c1", "c4"), count=12, repeats=1)
    data[0]["runs"].remove(runs_of(data[0], "continuous", "c4")[0])
    assert headline(Study(*data)).startswith("At 1 client (workload mixed), ")
    data[0]["runs"].remove(runs_of(data[0], "continuous", "c1")[0])
    data[0]["runs"] += comparison(("continuous",), ("c2",), count=12, repeats=1)[0]["runs"]
    assert "no load in common" in headline(Study(*data))


@pytest.mark.parametrize(("value", "text"), [(0.2706, "0.27x"), (1.04, "1.04x"), (3.104, "3.1x"), (12.3, "12x")])
def test_ratios_are_written_as_people_say_them(value: float, text: str) -> None:
    assert times(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "—"), (0.31, "0.31 ms"), (9.96, "10 ms"), (154.4, "154 ms"), (2346.0, "2.35 s"), (123_456.0, "123 s")],
)
def test_durations_are_in_the_unit_people_read(value: float | None, text: str) -> None:
    assert duration(value) == text


def test_lists_are_written_as_people_say_them() -> None:
    assert [listed(words) for words in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]


def test_of_a_sweep_alone_it_speaks_of_both_of_its_ends() -> None:
    study = Study(*comparison(points=("c16",), workloads=("variance:0", "variance:0.5", "variance:1.5")))
    assert "At 16 clients (workload variance:1.5), continuous delivered" in headline(study)
    said = " ".join(paragraph(study))
    assert "Where all answers are equally long (variance:0, at 16 clients) there is no difference" in said
    (told,) = re.findall(r"How much answers vary decides what continuous delivers: (.*?)\. ", said)
    assert re.search(r"[\d.]+x where all answers are equally long, [\d.]+x where answers vary by [\d.]+ of their", told)
    assert "better beyond the noise from 0." in told
