"""The charts as PNG and the looks of variants: files of a readable size, colours that can be told apart."""

from __future__ import annotations

import itertools
import math
import re
import struct
import warnings
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import pytest

from simulated_comparison import comparison, fail
from slipstream_client.report.charts import CHARTS, write_charts
from slipstream_client.report.curves import load_panels
from slipstream_client.report.explain import ENGINE_TIME, REQUEST_TIME, SLOTS, Part
from slipstream_client.report.series import SPARE_STYLES, STYLES, styles_of
from slipstream_client.report.study import Study


@pytest.fixture(autouse=True)
def _no_warnings():
    """A layout that does not fit, or a missing glyph, is only a warning to matplotlib."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def texts(name: str, study: Study) -> str:
    """All text of a chart."""
    with matplotlib.rc_context({"text.parse_math": False}):
        figure = CHARTS[name](study)
    return " | ".join(text.get_text().replace("\n", " ") for text in figure.findobj(matplotlib.text.Text))


def test_all_pngs_are_written_twice_as_wide_as_they_are_shown(tmp_path: Path) -> None:
    paths = write_charts(Study(*comparison()), tmp_path)
    assert [path.name for path in paths] == ["throughput.png", "latency_p99.png", "explain.png"]
    for path in paths:
        content = path.read_bytes()
        assert content[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", content[16:24])
        assert width == 1800
        assert 600 <= height <= 1600
        assert len(content) > 20_000


def test_every_line_is_labelled_with_its_variant_and_last_value() -> None:
    study = Study(*comparison())
    drawn = texts("throughput", study)
    for variant in study.variants:
        cell = study.cell("mixed", study.families[0].loads[-1], variant)
        assert cell
        assert f"{variant} {cell.metric('output_tokens_per_s'):.3g}" in drawn.replace(",", "")


def test_tails_are_called_what_they_are() -> None:
    assert "P99, or the largest of fewer than 100 requests, s" in texts("latency_p99", Study(*comparison()))
    many = texts("latency_p99", Study(*comparison(("dynamic", "continuous"), ("c16",), count=50)))
    assert "P99, s; lower is better" in many
    assert "no stream: dynamic" in many


def test_targets_are_told_in_the_words_of_the_page() -> None:
    results, requests, steps = comparison()
    results["plan"]["slo"] = {
        "chat": {"ttft": 2000.0, "tpot": 200.0, "e2e": None},
        "ttft:1500": {"ttft": 1500.0, "tpot": None, "e2e": None},
    }
    study = Study(results, requests, steps)
    drawn = texts("latency_p99", study)
    (panel,) = [panel for panel in load_panels(study, study.families[0]) if panel.key == "ttft_ms"]
    assert panel.note == "Targets: “chat” (first token within 2 s); first token within 1.5 s."
    assert [rule.label for rule in panel.rules] == ["target 1.5 s", "target 2 s"]
    for words in (panel.note, "target 1.5 s", "target 2 s"):
        assert words in drawn


def test_the_explain_chart_has_the_parts_and_totals() -> None:
    study = Study(*comparison())
    drawn = texts("explain", study)
    cell = study.cell("mixed", study.families[0].loads[-1], "static")
    assert cell
    slots = cell.parts("slots")
    assert slots
    assert f"{slots['total'] / (slots['useful_decode'] + slots['useful_prefill']):.3g}" in drawn
    assert "finished, but held for the batch's longest answer" in drawn


def test_runs_with_failures_are_marked() -> None:
    results, requests, steps = comparison()
    assert "Not filled" not in texts("throughput", Study(results, requests, steps))
    fail(results, requests, results["runs"][-1:], 3, "refused")
    assert "Not filled" in texts("throughput", Study(results, requests, steps))


@pytest.mark.parametrize("name", CHARTS)
def test_empty_failed_and_strange_results_are_drawn_too(name: str, tmp_path: Path) -> None:
    results, requests, steps = comparison(points=("c4",), count=6, repeats=1)
    for run in results["runs"]:
        fail(results, requests, [run], 6, "refused")
        run["request_time_ms"] = run["slots"] = None
    nothing = "not known" if name == "explain" else "nothing to show"
    assert nothing in texts(name, Study(results, requests, steps))
    assert nothing in texts(name, Study(results | {"runs": []}, [], []))
    study = Study(*comparison(("$x_1$ <script>alert(1)</script> & more",), ("c1", "c2"), count=6, repeats=1))
    assert "$x_1$ <script>alert(1)<…" in texts(name, study)
    assert len(write_charts(study, tmp_path)) == 3


def test_variants_keep_their_look_whoever_else_is_there() -> None:
    alone, together = styles_of(["continuous"]), styles_of(["mine", "static", "continuous", "yours"])
    assert alone["continuous"] is together["continuous"] is STYLES["continuous"]
    assert styles_of(["mine"])["mine"] is styles_of(["dynamic", "mine"])["mine"] is together["mine"]
    assert together["yours"] is not together["mine"]
    markers = [style.marker for style in (*STYLES.values(), *SPARE_STYLES)]
    assert len(set(markers)) == len(markers)


def test_up_to_ten_variants_all_look_different() -> None:
    names = [*STYLES, *(f"continuous,switch{number}=off" for number in range(len(SPARE_STYLES)))]
    assert len(set(styles_of(names).values())) == len(names) == 10
    assert len(styles_of([*names, "one more"])) == 11


# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
VISION = {
    "full": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
}


def linear(colour: str) -> list[float]:
    channels = [int(part, 16) / 255 for part in re.findall("..", colour[1:])]
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]


def lab(colour: str, vision: str) -> list[float]:
    """CIELAB of a colour as somebody with this vision sees it (D65)."""
    seen = [sum(w * c for w, c in zip(row, linear(colour), strict=True)) for row in VISION[vision]]
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [sum(w * min(max(c, 0), 1) for w, c in zip(row, seen, strict=True)) for row in to_xyz]
    f = [
        (v / white) ** (1 / 3) if v / white > 0.008856 else 7.787 * v / white + 16 / 116
        for v, white in zip(xyz, (0.9505, 1.0, 1.089), strict=True)
    ]
    return [116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])]


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_four_batchers_can_be_told_apart_by_colour_blind_eyes(theme: str, vision: str) -> None:
    colours = {name: lab(getattr(style, theme), vision) for name, style in STYLES.items()}
    for one, other in itertools.combinations(colours, 2):
        apart = math.dist(colours[one], colours[other])
        assert apart > 15, f"{one} and {other} look alike: {apart:.1f}"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_part_of_a_bar_has_the_colour_of_a_variant(theme: str) -> None:
    for part in (*SLOTS, *REQUEST_TIME, *ENGINE_TIME):
        for style in (*STYLES.values(), *SPARE_STYLES):
            colour = getattr(style, theme)
            apart = math.dist(lab(part.fill, "full"), lab(colour, "full"))
            assert apart > (15 if style in STYLES.values() else 9), f"{part.key} looks like {colour}: {apart:.1f}"


@pytest.mark.parametrize("parts", [SLOTS, REQUEST_TIME, ENGINE_TIME])
def test_parts_of_a_bar_differ_in_colour_and_from_their_neighbours_in_grey(parts: Sequence[Part]) -> None:
    for one, other in itertools.combinations(parts, 2):
        assert math.dist(lab(one.fill, "full"), lab(other.fill, "full")) > 14, f"{one.key} and {other.key} look alike"
    for one, other in itertools.pairwise(parts):
        step = abs(lab(one.fill, "full")[0] - lab(other.fill, "full")[0])
        assert step > 10, f"{one.key} and {other.key} are as light: {step:.1f}"


@pytest.mark.parametrize(("theme", "background"), [("light", "#ffffff"), ("dark", "#15171a")])
def test_labels_in_a_batcher_s_colour_have_the_contrast_of_text(theme: str, background: str) -> None:
    def luminance(colour: str) -> float:
        red, green, blue = linear(colour)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for style in (*STYLES.values(), *SPARE_STYLES):
        pair = sorted((luminance(getattr(style, theme)), luminance(background)))
        assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5
