"""The headline of a comparison: the ratio that was measured, or why there is none to tell."""

from __future__ import annotations

import pytest

from simulated_comparison import comparison, fail, run_of
from slipstream_client.report.headline import headline, times


def test_it_states_the_ratios_at_the_highest_concurrency() -> None:
    results, requests = comparison()
    run, base = run_of(results, "continuous"), run_of(results, "dynamic")
    run["output_tokens_per_s"], base["output_tokens_per_s"] = 205.2, 66.1
    run["e2e_ms"]["mean"], base["e2e_ms"]["mean"] = 2700.0, 10000.0
    found = headline(results, requests)
    assert found.startswith(
        "At concurrency 16, continuous delivered 3.1x the useful tokens/s of dynamic (205 against 66)"
    )
    assert found.endswith("x its longest request.")


@pytest.mark.parametrize(
    ("rate", "words"),
    [(50.0, "continuous was slower: 0.50x"), (103.0, "about the same useful tokens/s as dynamic (1.03x")],
)
def test_it_is_honest_when_nothing_was_gained(rate: float, words: str) -> None:
    results, requests = comparison(count=12)
    run_of(results, "dynamic")["output_tokens_per_s"] = 100.0
    run_of(results, "continuous")["output_tokens_per_s"] = rate
    assert words in headline(results, requests)


def test_it_cannot_say_where_requests_failed_or_answers_differ() -> None:
    results, requests = comparison(count=12)
    results["quality"] |= {"equal": False, "different": [{"request": "a", "reference": "b", "first_difference": 3}]}
    found = headline(results, requests)
    assert found.startswith("Cannot say")
    assert "different answers (1 of 132 comparisons)" in found
    fail(run_of(results, "dynamic"), requests, 5, "queue is full")
    assert headline(results, requests) == (
        "Cannot say how continuous compares with dynamic at concurrency 16: 5 of 12 requests of dynamic failed."
    )


def test_it_says_when_answers_were_not_compared() -> None:
    results, requests = comparison(count=12)
    results["quality"] = {"equal": None, "compared": 0, "different": []}
    assert "equal work is assumed, not shown" in headline(results, requests)


def test_it_claims_nothing_about_a_dynamic_batcher_that_formed_no_batch() -> None:
    """DYN-05: by the statistics of Triton itself; where they were not read, that is said as well."""
    results, requests = comparison(("dynamic", "continuous"), (4,), count=12)
    run = run_of(results, "dynamic", 4)
    assert (run["triton_inferences"], run["triton_executions"]) == (12, 3)
    found = headline(results, requests)
    assert "batch" not in found
    run["triton_executions"] = 12
    assert headline(results, requests) == (
        f"{found} But dynamic at concurrency 4: Triton's dynamic batcher did not batch (12 requests in 12 executions), "
        "so this shows nothing of dynamic batching."
    )
    for unread in (None, 0):
        run["triton_inferences"] = run["triton_executions"] = unread
        assert "whether Triton's dynamic batcher formed batches is not known" in headline(results, requests)


def test_a_comparison_of_one_batcher_or_of_none_claims_nothing() -> None:
    results, requests = comparison(("continuous",), (1, 4), count=12)
    rate = run_of(results, "continuous", 4)["output_tokens_per_s"]
    assert headline(results, requests).startswith(f"At concurrency 4, continuous delivered {rate:,.0f} useful tokens/s")
    assert "nothing else ran beside it" in headline(results, requests)
    assert headline(results | {"runs": []}, []) == "Nothing was measured."


def test_the_highest_concurrency_that_both_ran_is_taken() -> None:
    results, requests = comparison(("dynamic", "continuous"), (1, 4), count=12)
    last = run_of(results, "continuous", 4)
    results["runs"].remove(last)
    assert headline(results, requests).startswith("At concurrency 1, ")
    results["runs"].remove(run_of(results, "continuous", 1))
    results["runs"].append(last | {"concurrency": 64})
    assert "no concurrency in common" in headline(results, requests)


@pytest.mark.parametrize(("value", "text"), [(0.2706, "0.27x"), (1.04, "1.04x"), (3.104, "3.1x"), (12.3, "12x")])
def test_ratios_are_written_as_people_say_them(value: float, text: str) -> None:
    assert times(value) == text
