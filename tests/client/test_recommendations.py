"""The three answers: named with their reason and certainty, or refused."""

from __future__ import annotations

import pytest

from simulated_comparison import Data, comparison, conclude, fail, runs_of
from slipstream_client.report.recommendations import Recommendation, recommendations
from slipstream_client.report.study import Study
from slipstream_client.report.summary import paragraph
from slipstream_client.report.targets import attainment, held_load, missed, slo_title, slo_words

POINTS = ("c1", "c4", "c16")


def answers(data: Data) -> tuple[Recommendation, ...]:
    offline, few, many = recommendations(Study(*data))
    return offline, few, many


def set_rates(data: Data, rates: dict[str, float], point: str = "c16") -> None:
    """One rate for every repeat of each variant at a point, apart by a thousandth."""
    for variant, rate in rates.items():
        for number, run in enumerate(runs_of(data[0], variant, point)):
            run["output_tokens_per_s"] = rate * (1 + number / 1000)
    conclude(data[0], data[1])


def test_offline_work_goes_to_the_most_tokens_with_the_next_best_named() -> None:
    data = comparison(points=POINTS)
    set_rates(data, {"static": 60.0, "dynamic": 70.0, "iterative": 100.0, "continuous": 200.0})
    offline, _, _ = answers(data)
    assert (offline.use, offline.pick) == ("Offline work", "continuous")
    assert "continuous delivers the most useful tokens/s on mixed: 200 (at 16 clients), against 100 of iterative" in (
        offline.found
    )
    assert offline.sure.startswith("continuous against iterative, the next: 2.0x (the repeats span 2.00x to 2.00x, ")
    assert "of what the model computed for continuous was useful, but only" in offline.reason


def test_two_that_the_noise_cannot_tell_apart_are_both_named() -> None:
    data = comparison(points=POINTS)
    set_rates(data, {"iterative": 200.0, "continuous": 200.1})
    offline, _, _ = answers(data)
    assert offline.pick == "continuous or iterative"
    assert offline.sure.startswith("No difference beyond the noise between continuous and iterative.")


def test_a_large_noise_floor_is_told_beside_an_equality() -> None:
    data = comparison(points=POINTS)
    set_rates(data, {"iterative": 200.0, "continuous": 200.1})
    data[0]["noise"]["metrics"]["output_tokens_per_s"]["floor"] = 0.25
    offline, _, _ = answers(data)
    assert "But the noise is large: a floor of 17.1% hides any difference smaller than that." in offline.sure


def test_variants_whose_repeats_overlap_are_not_told_apart_however_small_the_floor() -> None:
    data = comparison(points=POINTS)
    for variant, rates in {"iterative": (150.0, 210.0), "continuous": (200.0, 220.0)}.items():
        for run, rate in zip(runs_of(data[0], variant), rates, strict=True):
            run["output_tokens_per_s"] = rate
    data[0]["noise"]["metrics"]["output_tokens_per_s"]["floor"] = 0.01
    assert answers(data)[0].pick == "continuous or iterative"


def test_each_variant_is_taken_at_its_own_best_load() -> None:
    data = comparison(points=POINTS)
    set_rates(data, {"dynamic": 300.0}, "c4")
    offline, _, _ = answers(data)
    assert offline.pick == "dynamic"
    assert "(at 4 clients)" in offline.found


def test_a_few_users_are_served_by_those_that_stream_where_the_whole_answer_takes_the_same() -> None:
    _, few, _ = answers(comparison(points=POINTS))
    assert set(few.pick.split(" or ")) == {"iterative", "continuous"}
    assert "show nothing before the whole answer" in few.reason
    assert few.sure.startswith("In the time of a whole answer: no difference beyond the noise between ")


def test_a_few_users_are_served_by_the_shortest_answer_where_there_is_one() -> None:
    data = comparison(points=POINTS)
    for run in runs_of(data[0], "static", "c1"):
        run["e2e_ms"] = {name: value / 2 for name, value in run["e2e_ms"].items()}
    conclude(data[0], data[1])
    _, few, _ = answers(data)
    assert few.pick == "static"


def test_many_users_go_to_whoever_holds_the_highest_load() -> None:
    data = comparison(points=POINTS)
    for run in data[0]["runs"]:
        held = (run["variant"], run["point"]) in {("continuous", "c1"), ("continuous", "c4"), ("iterative", "c1")}
        run["slo"]["chat"] |= {"good": run["requests"] if held else 1, "sent": run["requests"]}
    _, _, many = answers(data)
    assert many.pick == "continuous"
    assert "iterative up to 1 client and continuous up to 4 clients; static and dynamic at none" in many.found
    assert "continuous 100.0% (48 of 48, 95% interval 93% to 100%)" in many.sure
    assert "static 4.2% (2 of 48, 95% interval " in many.sure
    assert many.sure.endswith("The next load tried, 16 clients, is beyond all of them.")


def test_where_all_loads_are_held_it_says_that_the_limit_may_lie_higher() -> None:
    data = comparison(points=POINTS)
    for run in data[0]["runs"]:
        run["slo"]["chat"] |= {"good": run["requests"], "sent": run["requests"]}
    _, _, many = answers(data)
    assert many.sure.endswith("It is the highest load tried, so the limit may lie higher.")
    assert "Of these continuous has the shortest tail there" in many.found


def test_where_none_holds_the_target_none_is_named() -> None:
    data = comparison(points=POINTS)
    for run in data[0]["runs"]:
        run["slo"]["chat"] |= {"good": 3, "sent": 4}
    _, _, many = answers(data)
    assert many.pick == ""
    assert many.found.startswith("None keeps the target “chat” (first token within 2 s, 200 ms for each further token)")
    assert "static 75.0% (6 of 8, 95% interval 41% to 93%)" in many.found


def test_open_loops_decide_about_many_users_where_they_were_measured() -> None:
    _, _, many = answers(comparison(points=("c4", "r0.5", "r2")))
    assert "requests/s" in many.found
    assert "clients" not in many.found


def test_without_a_target_the_tail_at_the_highest_load_decides() -> None:
    data = comparison(points=POINTS)
    data[0]["plan"]["slo"] = {}
    _, _, many = answers(data)
    assert many.pick == "continuous"
    assert many.found.startswith("No target was given. At 16 clients on mixed the tail (max of 48) of continuous is ")


def test_none_is_named_where_requests_failed_answers_differ_or_points_are_invalid() -> None:
    data = comparison(points=("c16",))
    fail(data[0], data[1], runs_of(data[0], "static")[:1], 2, "refused")
    offline, few, _ = answers(data)
    assert offline.pick == few.pick == ""
    assert offline.found == "No winner is named: 2 of 48 requests of static failed at 16 clients."
    data = comparison(points=POINTS)
    runs_of(data[0], "iterative", "c4")[0].update(valid=False, invalid_because=["the client fell behind"])
    many = answers(data)[2]
    assert many.pick == ""
    assert "the point of iterative at 4 clients is invalid (the client fell behind)" in many.found
    data = comparison(points=POINTS)
    data[0]["quality"] |= {"equal": False, "different": [{}]}
    assert [answer.found for answer in answers(data)] == [
        "No winner is named: the batchers gave different answers."
    ] * 3


def test_failures_at_a_load_that_is_not_held_anyway_do_not_hide_who_holds_which() -> None:
    data = comparison(points=POINTS)
    fail(data[0], data[1], runs_of(data[0], "dynamic"), 4, "refused")
    assert answers(data)[2].pick != ""


def test_nothing_is_recommended_where_nothing_is_compared() -> None:
    assert recommendations(Study(*comparison(("continuous",), ("c4",), count=6))) == []
    assert recommendations(Study(*comparison((), ("c4",), count=6))) == []


def test_one_run_each_says_that_its_certainty_is_not_known() -> None:
    offline, _, _ = answers(comparison(points=("c1", "c16"), repeats=1))
    assert "how sure is not known" in offline.sure


def test_a_held_load_needs_all_loads_below_it() -> None:
    data = comparison(points=POINTS)
    for run in runs_of(data[0], "continuous", "c4"):
        run["slo"]["chat"] |= {"good": 0}
    study = Study(*data)
    load = held_load(study, study.families[0], "continuous", "chat")
    assert load
    assert load.label == "c1"
    cell = study.cell("mixed", study.families[0].loads[1], "continuous")
    assert cell
    assert attainment(cell, "chat") == 0.0
    assert attainment(cell, "another") is None


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"ttft": 500.0, "tpot": 30.0, "e2e": None}, "first token within 500 ms, 30 ms for each further token"),
        ({"ttft": None, "tpot": None, "e2e": 8000.0}, "whole answer within 8 s"),
    ],
)
def test_targets_in_words(limits: dict[str, float | None], words: str) -> None:
    assert slo_words(limits) == words


def near_miss(data: Data) -> None:
    """At 16 clients continuous keeps the target with all of 24 requests a run, iterative with all but its two last."""
    for run in data[0]["runs"]:
        good = {"continuous": 24, "iterative": 23, "dynamic": 12}.get(run["variant"], 0)
        run["slo"]["chat"] |= {"good": good if run["point"] == "c16" else 24, "sent": 24}
    for record in data[1]:
        variant, _, point, _ = record["run"].split("/")
        if record["phase"] == "measured" and (variant, point) == ("iterative", "c16"):
            late = 2.5 if record["index"] == 7 else 0.5
            record |= {"intended": record["sent"], "first": record["sent"] + late, "output_tokens": 2}
            record |= {"last": record["first"] + 0.1, "chunks": [(record["first"], 1), (record["first"] + 0.1, 1)]}


def test_a_runner_up_whose_interval_overlaps_the_winner_s_is_named_beside_it() -> None:
    """Of 48 requests 46 and 48: 95% intervals 86% to 99% and 93% to 100%; of 24, 50% lies apart."""
    data = comparison(points=POINTS)
    near_miss(data)
    _, _, many = answers(data)
    assert many.pick == "continuous or iterative"
    assert "iterative cannot be told apart at 16 clients: 2 of 48 missed (2 by the time to first token)." in many.found
    assert many.reason.startswith("An average request of dynamic spends ")  # the next that really fails, not static


def test_misses_are_told_without_a_limit_where_the_records_do_not_account_for_them() -> None:
    data = comparison(points=POINTS)
    near_miss(data)
    for run in runs_of(data[0], "iterative"):
        run["slo"]["chat"]["good"] = 20
    study = Study(*data)
    cell = study.cell("mixed", study.families[0].loads[-1], "iterative")
    assert cell
    assert missed(cell, "chat", study.slo["chat"]) == "8 of 48 missed"


def test_a_second_load_of_at_most_four_is_told_beside_a_few_users() -> None:
    few = answers(comparison(points=POINTS))[1]
    assert few.use == "A few users (1 client)"
    assert " At 4 clients it takes " in few.found
    assert " At 16 clients it takes " not in answers(comparison(points=("c1", "c16")))[1].found


def test_equals_are_named_with_the_subject_first_and_then_as_planned() -> None:
    data = comparison(points=POINTS)
    set_rates(data, {"static": 200.2, "dynamic": 10.0, "iterative": 200.1, "continuous": 200.0})
    assert answers(data)[0].pick == "continuous, static or iterative"


def test_offline_work_is_explained_at_the_highest_load_as_the_headline_is() -> None:
    data = comparison(points=POINTS)
    set_rates(data, {"static": 60.0, "dynamic": 50.0, "iterative": 100.0, "continuous": 200.0})
    set_rates(data, {"dynamic": 55.0}, "c4")
    offline = answers(data)[0]
    assert offline.reason.startswith("At 16 clients, ")
    assert offline.reason[len("At 16 clients, ") :] in " ".join(paragraph(Study(*data)))


def test_limits_given_as_such_are_shown_in_words_and_a_preset_by_its_name() -> None:
    limits = {"ttft": 4000.0, "tpot": 400.0, "e2e": None}
    assert slo_title("ttft:4000 tpot:400", limits) == "first token within 4 s, 400 ms for each further token"
    assert slo_title("chat", limits) == "chat"
