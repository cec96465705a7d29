"""The charts of the page: places, ticks, labels, whiskers; drawings that carry no colour of their own."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from simulated_comparison import comparison, fail, runs_of
from slipstream_client.report.curves import distribution_panels, load_panels
from slipstream_client.report.formats import duration
from slipstream_client.report.knees import knee_rows
from slipstream_client.report.plot import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Line,
    Mark,
    Panel,
    Rule,
    round_ticks,
)
from slipstream_client.report.study import Study
from slipstream_client.report.sweep import sweep_panel, sweep_sentences

POINTS = ("c1", "c4", "c16")


def drawn(panel: Panel) -> ElementTree.Element:
    return ElementTree.fromstring(str(panel.draw()[0]))


def texts(panel: Panel, kind: str = "tick") -> list[str]:
    return [text.text or "" for text in drawn(panel).iter("text") if (text.get("class") or "").startswith(kind)]


def test_marks_lie_where_their_values_are() -> None:
    line = Line("one", 0, [Mark(0, 0, "low"), Mark(10, 50, "middle", 25, 75), Mark(20, 100, "high")])
    panel = Panel("t", "s", [line], x_ticks=[0, 10, 20], top=100.0)
    _, hovers = panel.draw()
    left, right, bottom = LEFT + 10, WIDTH - RIGHT - 8, HEIGHT - BOTTOM
    assert [hover.tip for hover in hovers] == ["low", "middle", "high"]
    assert [hover.left * WIDTH / 100 for hover in hovers] == pytest.approx([left, (left + right) / 2, right])
    assert [hover.top * HEIGHT / 100 for hover in hovers] == pytest.approx([bottom, (TOP + bottom) / 2, TOP])
    (whisker,) = [path.get("d") for path in drawn(panel).iter("path") if path.get("class") == "whisker s0"]
    quarter = (bottom - TOP) / 4
    assert whisker == f"M{(left + right) / 2:.1f},{bottom - quarter:.1f}V{TOP + quarter:.1f}"


def test_a_logarithmic_axis_gives_equal_ratios_equal_room() -> None:
    line = Line("one", 0, [Mark(x, 1, f"{x}") for x in (1, 4, 16)])
    places = [hover.left for hover in Panel("t", "s", [line], x_ticks=[1, 4, 16], log_x=True).draw()[1]]
    assert places[1] - places[0] == pytest.approx(places[2] - places[1])


def test_marks_on_one_another_share_their_tip() -> None:
    lines = [Line(name, at, [Mark(1, 5.0, name), Mark(2, 5.0 + 4 * at, name)]) for at, name in enumerate(("a", "b"))]
    tips = [hover.tip for hover in Panel("t", "s", lines, x_ticks=[1, 2]).draw()[1]]
    assert tips == ["a\nb", "a", "b"]


def test_a_hollow_mark_is_drawn_as_such_and_names_are_escaped_and_cut() -> None:
    panel = Panel("<b>", "&", [Line("<i>a very long name", 3, [Mark(1, 1, "x", hollow=True)], marker="X")])
    html = str(panel.draw()[0])
    assert 'class="marker s3 hollow"' in html
    assert "<i>" not in html
    assert "<b>" not in html
    assert texts(panel, "name") == ["<i>a very long…"]


def test_a_line_that_ends_in_the_plot_is_named_there_and_one_that_ends_at_its_edge_beside_it() -> None:
    short, long = (
        Line("short", 0, [Mark(0, 0, ""), Mark(10, 50, "")]),
        Line("long", 1, [Mark(0, 0, ""), Mark(20, 50, "")]),
    )
    named = {text.text: text for text in drawn(Panel("t", "s", [short, long], top=100.0)).iter("text")}
    end = LEFT + 10 + (WIDTH - RIGHT - 8 - LEFT - 10) * 10 / (20 * 1.04)
    middle = (TOP + HEIGHT - BOTTOM) / 2
    assert float(named["short"].get("x") or 0) == pytest.approx(end + 7.5, abs=0.1)
    assert float(named["short"].get("y") or 0) == pytest.approx(middle - 7.5, abs=0.1)
    assert float(named["long"].get("x") or 0) == WIDTH - RIGHT + 6
    assert float(named["long"].get("y") or 0) == pytest.approx(middle + 4, abs=0.1)


def test_the_label_of_a_mark_gives_way_to_whiskers_and_falls_away_where_no_place_is_free() -> None:
    def places(*lines: Line) -> list[tuple[float, float]]:
        root = drawn(Panel("t", "s", lines, x_ticks=[0, 20], top=100.0))
        found = [text for text in root.iter("text") if text.get("class") == "tick at"]
        return [(float(text.get("x") or 0), float(text.get("y") or 0)) for text in found]

    marks = [Mark(10, 50, "", label="16"), Mark(20, 50, "")]
    x, y = (LEFT + 10 + WIDTH - RIGHT - 8) / 2, (TOP + HEIGHT - BOTTOM) / 2
    assert places(Line("a", 0, marks)) == [pytest.approx((x + 6.6, y - 6.6), abs=0.1)]
    above = Line("b", 1, [Mark(15, 55, "", x_low=0, x_high=20)])
    assert places(Line("a", 0, marks), above) == [pytest.approx((x + 6.6, y + 14.3), abs=0.1)]
    bars = [Line(f"{at}", 1, [Mark(15, at, "", x_low=0, x_high=20)]) for at in (42, 44, 46, 48, 52, 54, 56, 58)]
    assert places(Line("a", 0, marks), *bars) == []


def test_no_drawing_has_a_colour_of_its_own() -> None:
    study = Study(*comparison(points=POINTS))
    for panel in load_panels(study, study.families[0]):
        assert not re.search(r"#[0-9a-f]{3,6}|rgb|style=", str(panel.draw()[0]))


def test_rules_and_the_band_are_at_their_values() -> None:
    line = Line("one", 0, [Mark(0, 100, "")])
    panel = Panel("t", "s", [line], x_ticks=[0, 1], rules=[Rule(50, "half")], band=(25, 75), top=100.0)
    root, middle = drawn(panel), (TOP + HEIGHT - BOTTOM) / 2
    (rule,) = [each for each in root.iter("line") if each.get("class") == "rule"]
    assert float(rule.get("y1") or 0) == pytest.approx(middle, abs=0.1)
    (band,) = [each for each in root.iter("rect") if each.get("class") == "band"]
    assert float(band.get("y") or 0) + float(band.get("height") or 0) / 2 == pytest.approx(middle, abs=0.1)
    (label,) = [each for each in root.iter("text") if each.text == "half"]
    assert (float(label.get("x") or 0), float(label.get("y") or 0)) == pytest.approx((WIDTH - RIGHT + 6, middle + 4))


def test_throughput_has_its_intervals_as_whiskers_or_else_the_span_of_the_repeats() -> None:
    results, requests, steps = comparison(points=POINTS)
    study = Study(results, requests, steps)
    panel = load_panels(study, study.families[0])[0]
    mark = next(line for line in panel.lines if line.name == "continuous").marks[-1]
    rates = [run["output_tokens_per_s"] for run in runs_of(results, "continuous")]
    assert (mark.x, mark.y) == (16, pytest.approx(sum(rates) / 2))
    assert (mark.low, mark.high) == (min(rates) * 0.99, max(rates) * 1.01)
    assert f"({mark.low:.3g} to {mark.high:.3g})" in mark.tip.replace(",", "")
    del results["intervals"]
    study = Study(results, requests, steps)
    mark = next(line for line in load_panels(study, study.families[0])[0].lines if line.name == "continuous").marks[-1]
    assert (mark.low, mark.high) == (min(rates), max(rates))


def test_of_a_single_load_the_marks_stand_side_by_side() -> None:
    study = Study(*comparison(points=("c4",), count=6))
    panel = load_panels(study, study.families[0])[0]
    assert [mark.x for line in panel.lines for mark in line.marks] == [0, 1, 2, 3]
    assert panel.x_title == "4 clients"
    assert texts(panel).count("4 clients") == 1
    assert not {"0", "1", "2", "3"} & set(texts(panel)[-5:])


def test_goodput_of_nothing_has_no_chart() -> None:
    results, requests, steps = comparison(points=POINTS)
    for run in results["runs"]:
        run["slo"]["chat"]["goodput_per_s"] = 0.0
    study = Study(results, requests, steps)
    assert [p.key for p in load_panels(study, study.families[0]) if p.key.startswith("goodput")] == ["goodput whole"]


def test_targets_are_drawn_where_they_lie_near_and_told_where_they_are_far() -> None:
    results, requests, steps = comparison(points=POINTS)
    slowest = max(run["ttft_ms"]["p99"] for run in results["runs"] if run["ttft_ms"])
    for limit in (slowest * 2, slowest * 30):
        results["plan"]["slo"] = {"chat": {"ttft": limit, "tpot": 1.0, "e2e": None}}
        study = Study(results, requests, steps)
        panel = next(p for p in load_panels(study, study.families[0]) if p.key == "ttft_ms")
        near = limit == slowest * 2
        assert [rule.at for rule in panel.rules] == ([limit / 1000] if near else [])
        place = "Targets" if near else "Above the chart"
        assert panel.note == f"{place}: “chat” (first token within {duration(limit)})."


def test_knees_that_coincide_share_one_mark() -> None:
    results, requests, steps = comparison(points=POINTS)
    for variant, at in (("static", 4), ("dynamic", 4), ("continuous", 16), ("iterative", 99)):
        results["knees"][f"{variant}/mixed"]["throughput"] = {"at": at, "confidence": "9 of 10"}
    study = Study(results, requests, steps)
    rules = load_panels(study, study.families[0])[0].rules
    assert [(rule.at, rule.style) for rule in rules] == [(4, None), (16, 3)]
    assert rules[0].tip == (
        "throughput knee of static: 4 clients (9 of 10)\nthroughput knee of dynamic: 4 clients (9 of 10)"
    )
    words = {variant: each for variant, _, each in knee_rows(study)}
    assert words["iterative"][0] == "99 clients: 9 of 10"
    assert words["static"][1] == "no knee"


def test_distributions_reach_from_the_first_request_to_the_last() -> None:
    results, requests, steps = comparison(points=("c16",))
    study = Study(results, requests, steps)
    ttft, e2e = distribution_panels(study, study.families[0], study.families[0].loads[0])
    assert [line.name for line in ttft.lines] == ["iterative", "continuous"]
    assert "no stream: static and dynamic" in ttft.subtitle
    times = sorted(
        r["last"] - r["sent"] for r in requests if r["run"].startswith("continuous") and r["phase"] == "measured"
    )
    marks = e2e.lines[-1].marks
    assert (marks[0].x, marks[-1].x) == (times[0], times[-1])
    assert (marks[0].y, marks[-1].y) == (pytest.approx(100 / 48), 100.0)
    (median,) = [mark for mark in marks if "50%" in mark.tip]
    assert median.x == times[23]


def test_failed_points_are_hollow_and_told() -> None:
    results, requests, steps = comparison(points=POINTS)
    fail(results, requests, runs_of(results, "continuous"), 2, "refused")
    study = Study(results, requests, steps)
    panel = load_panels(study, study.families[0])[0]
    hollow = [(line.name, mark.x) for line in panel.lines for mark in line.marks if mark.hollow]
    assert hollow == [("continuous", 16)]
    assert panel.note.startswith("Not filled")


def test_the_sweep_is_ordered_by_the_variation_that_was_served() -> None:
    results, requests, steps = comparison(points=("c16",), workloads=("variance:1", "variance:0"))
    study = Study(results, requests, steps)
    panel = sweep_panel(study)
    assert panel
    assert panel.key == "sweep"
    line = next(line for line in panel.lines if line.name == "continuous")
    lengths = [
        r["output_tokens"] for r in requests if r["run"] == "static/variance:1/c16/0" and r["phase"] == "measured"
    ]
    mean = sum(lengths) / len(lengths)
    variation = (sum((length - mean) ** 2 for length in lengths) / len(lengths)) ** 0.5 / mean
    assert [mark.x for mark in line.marks] == [0.0, pytest.approx(variation)]
    assert line.marks[1].y > line.marks[0].y
    said = sweep_sentences(study)["continuous"]
    assert "where all answers are equally long" in said
    assert f"better beyond the noise from {variation:.2f} on" in said
    assert sweep_panel(Study(*comparison(points=("c16",), workloads=("variance:1",)))) is None


@pytest.mark.parametrize(
    ("high", "ticks"),
    [(10.0, [0, 2, 4, 6, 8, 10]), (47.0, [0, 10, 20, 30, 40]), (0.3, [0, 0.1, 0.2, 0.3]), (0.0, [0.0])],
)
def test_ticks_are_round(high: float, ticks: list[float]) -> None:
    assert round_ticks(high) == pytest.approx(ticks)
