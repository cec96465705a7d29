"""The charts: files of a readable size, colours that can be told apart, names and tails that say what they are."""

from __future__ import annotations

import itertools
import re
import struct
import warnings
from pathlib import Path
from xml.etree import ElementTree

import pytest

from simulated_comparison import comparison, fail
from slipstream_client.report.charts import CHARTS, chart_svg, write_charts
from slipstream_client.report.series import SPARE_STYLES, STYLES, series_name, styles_of, tail_ms, tail_name


@pytest.fixture(autouse=True)
def _no_warnings():
    """A layout that does not fit, or a missing glyph, is only a warning to matplotlib."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def texts(svg: bytes) -> str:
    root = ElementTree.fromstring(svg)
    return " | ".join("".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text"))


def test_both_pngs_are_written_twice_as_wide_as_they_are_shown(tmp_path: Path) -> None:
    results, requests = comparison()
    paths = write_charts(results, requests, tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["throughput.png", "latency_p99.png"]
    for path in paths:
        content = path.read_bytes()
        assert content[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", content[16:24])
        assert width == 1800
        assert 600 <= height <= 1000
        assert len(content) > 20_000


def test_every_line_is_labelled_with_its_batcher_and_last_value() -> None:
    results, requests = comparison()
    drawn = texts(chart_svg(results, requests, "throughput"))
    for run in results["runs"]:
        if run["concurrency"] == 16:
            rate = run["output_tokens_per_s"]
            assert f"{run['batcher']} {rate:.0f}" in drawn or f"{run['batcher']} {rate:.3g}" in drawn


def test_fewer_than_a_hundred_requests_are_a_max_and_not_a_p99() -> None:
    drawn = texts(chart_svg(*comparison(count=24), "latency_p99"))
    assert "max of 24 requests" in drawn
    assert "P99" not in drawn
    assert "P99" in texts(chart_svg(*comparison(("dynamic",), (4,), count=100), "latency_p99"))


def test_the_max_is_that_of_the_records_not_an_interpolated_percentile() -> None:
    results, requests = comparison(("continuous",), (4,), count=24)
    run = results["runs"][0]
    run["e2e_ms"]["p99"] = 1.0
    longest = max(record["last"] - record["sent"] for record in requests)
    assert tail_ms(run, "e2e_ms", requests) == pytest.approx(longest * 1000)
    assert tail_name(run) == "max of 24"
    run["requests"] = 100
    assert tail_ms(run, "e2e_ms", requests) == 1.0


def test_a_batcher_that_does_not_stream_is_named_as_such() -> None:
    drawn = texts(chart_svg(*comparison(), "latency_p99")).replace(" | ", " ")
    assert "no stream: static, dynamic" in drawn


def test_a_single_concurrency_is_drawn_as_bars_with_values() -> None:
    results, requests = comparison(concurrencies=(16,))
    drawn = texts(chart_svg(results, requests, "throughput"))
    assert "at concurrency 16" in drawn
    for run in results["runs"]:
        assert f"{run['output_tokens_per_s']:.3g}" in drawn


def test_runs_with_failures_are_marked() -> None:
    results, requests = comparison()
    assert "Not filled" not in texts(chart_svg(results, requests, "throughput"))
    fail(results["runs"][-1], requests, 3, "refused")
    for name in CHARTS:
        assert "Not filled" in texts(chart_svg(results, requests, name))


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("name", CHARTS)
def test_empty_failed_and_strange_results_are_drawn_too(name: str, narrow: bool) -> None:
    results, requests = comparison(concurrencies=(4,), count=12)
    for run in results["runs"]:
        fail(run, requests, 12, "refused")
    assert "nothing to show" in texts(chart_svg(results, requests, name, narrow=narrow))
    assert "nothing to show" in texts(chart_svg(results | {"runs": []}, [], name, narrow=narrow))
    results, requests = comparison(("$x_1$ <script>alert(1)</script> & more",), (1, 2), count=6)
    svg = chart_svg(results, requests, name, narrow=narrow)
    assert "$x_1$ <script>alert(1)<…" in texts(svg)
    assert b"<script" not in svg


def test_the_same_results_give_the_same_bytes_and_the_dark_ones_others() -> None:
    results, requests = comparison(("dynamic",), (4,), count=6)
    light = chart_svg(results, requests, "throughput")
    assert light == chart_svg(results, requests, "throughput")
    assert light != chart_svg(results, requests, "throughput", dark=True)


def test_an_executor_other_than_our_own_is_part_of_the_name() -> None:
    assert series_name({"batcher": "dynamic", "executor": "native"}) == "dynamic"
    assert series_name({"batcher": "dynamic", "executor": "transformers"}) == "dynamic (transformers)"


def test_batchers_keep_their_look_whoever_else_is_there() -> None:
    alone, together = styles_of(["continuous"]), styles_of(["mine", "static", "continuous", "yours"])
    assert alone["continuous"] is together["continuous"] is STYLES["continuous"]
    assert together["mine"] is SPARE_STYLES[0]
    assert together["yours"] is SPARE_STYLES[1]
    markers = [style.marker for style in (*STYLES.values(), *SPARE_STYLES)]
    assert len(set(markers)) == len(markers)


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
        distance = sum((a - b) ** 2 for a, b in zip(colours[one], colours[other], strict=True)) ** 0.5
        assert distance > 15, f"{one} and {other} look alike: {distance:.1f}"


@pytest.mark.parametrize(("theme", "background"), [("light", "#ffffff"), ("dark", "#15171a")])
def test_labels_in_a_batcher_s_colour_have_the_contrast_of_text(theme: str, background: str) -> None:
    def luminance(colour: str) -> float:
        red, green, blue = linear(colour)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for style in (*STYLES.values(), *SPARE_STYLES):
        pair = sorted((luminance(getattr(style, theme)), luminance(background)))
        assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5
