"""The comparison with other engines: what is read from their output, and what its tables say."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.peers import llama_bench, llama_cpp
from benchmarks.peers.llama_cpp import PeerUnavailable
from benchmarks.peers.parts import NAMES, Setting, make_part
from benchmarks.peers.ratios import Found, Piece, Point, Unavailable, Values, measure, table


def test_speeds_of_llama_batched_bench_are_medians_of_its_json_lines() -> None:
    lines = "\n".join(
        (
            "",
            '{"n_kv_max": 1024, "pp": 112, "tg": 8, "pl": 1, "speed_pp": 380.9, "speed_tg": 39.1, "speed": 240.7}',
            '{"n_kv_max": 1024, "pp": 112, "tg": 8, "pl": 4, "speed_pp": 414.2, "speed_tg": 80.5, "speed": 324.5}',
            '{"n_kv_max": 1024, "pp": 112, "tg": 8, "pl": 4, "speed_pp": 400.0, "speed_tg": 82.5, "speed": 324.5}',
            "llama_perf_context_print: load time = 93.1 ms",
        )
    )
    assert llama_bench.speeds(lines, by="pl", speed="speed_tg") == {1: 39.1, 4: 81.5}
    assert llama_bench.speeds(lines, by="pp", speed="speed_pp") == {112: 400.0}


def test_a_ratio_is_of_one_round_and_the_table_has_their_median_and_spread() -> None:
    # The machine gets twice as slow in the second round; the ratio does not.
    found = Found(Point("16 sequences", bar=1.2), ours=[200.0, 100.0, 130.0], peer=[160.0, 80.0, 100.0])
    assert found.ratios == [1.25, 1.25, 1.3]
    assert table("Decode", [found]).splitlines()[-1] == (
        "| 16 sequences, tokens/s | 130.0 | 100.0 | 1.25 | 1.25 to 1.30 | at least 1.2 | met |"
    )


@pytest.mark.parametrize(
    ("point", "ratio", "met"),
    [
        (Point("throughput", bar=1.2), 1.2, True),
        (Point("throughput", bar=1.2), 1.19, False),
        (Point("P99 TTFT", "ms", bar=1.0, at_most=True), 0.9, True),
        (Point("P99 TTFT", "ms", bar=1.0, at_most=True), 1.1, False),
        (Point("throughput"), 0.1, None),
    ],
)
def test_a_bar_is_the_least_ratio_of_a_speed_and_the_most_of_a_time(point: Point, ratio: float, met: bool) -> None:
    assert point.met(ratio) is met


def test_sides_take_turns_in_opposite_order() -> None:
    point = Point("speed")
    order: list[str] = []

    def side(name: str, value: float) -> Values:
        order.append(name)
        return {point: value}

    piece = Piece([point], lambda number: side("ours", number + 2.0), lambda number: side("peer", 1.0))
    found = {point: Found(point)}
    for number in range(3):
        measure(piece, number, found)
    assert order == ["ours", "peer", "peer", "ours", "ours", "peer"]
    assert found[point].ratios == [2.0, 3.0, 4.0]


def test_what_a_side_cannot_do_here_is_asked_once_and_the_table_says_why() -> None:
    point = Point("generate_batch()", bar=1.0)
    asked: list[int] = []

    def refuse(number: int) -> Values:
        asked.append(number)
        raise Unavailable("it needs an accelerator")

    found = {point: Found(point)}
    for number in range(2):
        measure(Piece([point], lambda number: {point: 1.0}, refuse), number, found)
    assert asked == [0]
    text = table("transformers", [found[point]])
    assert "| generate_batch(), tokens/s | n/a | n/a | n/a | | at least 1 | n/a |" in text
    assert text.endswith("\nn/a: it needs an accelerator\n")


def test_no_two_points_of_all_parts_are_the_same() -> None:
    parts = [make_part(name, Setting(llama=None, threads=1)) for name in NAMES]
    points = [(part.name, point.name) for part in parts for piece in part.pieces for point in piece.points]
    assert len(set(points)) == len(points)


def test_a_folder_without_the_programs_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "llama-batched-bench").touch()
    with pytest.raises(PeerUnavailable, match="has no llama-quantize; it must hold llama-batched-bench"):
        llama_cpp.install(tmp_path)


def test_a_build_without_cmake_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(llama_cpp, "_BUILD_BYTES", 0)
    with pytest.raises(PeerUnavailable, match="needs cmake to be built: install it"):
        llama_cpp.install()
