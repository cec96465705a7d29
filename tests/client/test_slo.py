"""Service level objectives: what keeps one, how one is written, and how sure attainment is."""

from __future__ import annotations

import pytest

from recorded import record
from slipstream_client.comparison.slo import PRESETS, Slo, parse_slo, slo_figures, wilson_interval
from slipstream_client.errors import SlipstreamError

# TTFT 500 ms and E2E 1000 ms, each 250 ms more from the intended time; TPOT 500 / 4 = 125 ms.
STREAMED = record(sent=1.0, intended=0.75, chunks=[(1.5, 1), (2.0, 4)])


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"ttft": 750.0}, True),
        ({"ttft": 749.0}, False),
        ({"tpot": 125.0}, True),
        ({"tpot": 124.0}, False),
        ({"e2e": 1250.0}, True),
        ({"e2e": 1249.0}, False),
        ({"ttft": 750.0, "tpot": 124.0, "e2e": 1250.0}, False),
        ({}, True),
    ],
)
def test_a_good_request_keeps_every_limit_from_its_intended_time(limits: dict[str, float], kept: bool) -> None:
    assert Slo("limits", **limits).kept_by(STREAMED) is kept


def test_where_nothing_streams_the_first_token_comes_with_the_answer() -> None:
    whole = record(sent=1.0, chunks=[(1.5, 90)], streams=False)
    assert Slo("tight", ttft=500, tpot=0.001).kept_by(whole)
    assert not Slo("tighter", ttft=499).kept_by(whole)


def test_a_single_token_has_no_time_between_tokens() -> None:
    assert Slo("tight", tpot=0.001).kept_by(record(chunks=[(1.5, 1)]))


def test_a_failed_request_is_never_good() -> None:
    assert not Slo("none").kept_by(record(chunks=[(1.1, 5)], error="cut off"))
    assert not Slo("none").kept_by(record(sent=1.0))


def test_attainment_is_of_all_that_were_sent_and_goodput_of_the_window() -> None:
    records = [*[record(at, chunks=[(1.1, 5)]) for at in range(3)], record(3, last=1.2, error="refused")]
    figures = slo_figures(records, PRESETS["interactive"], duration_s=2.0)
    assert (figures["good"], figures["sent"], figures["attainment"], figures["goodput_per_s"]) == (3, 4, 0.75, 1.5)
    assert (figures["low"], figures["high"]) == wilson_interval(3, 4)


def test_nothing_sent_attains_nothing_known() -> None:
    figures = slo_figures([], PRESETS["chat"], duration_s=0.0)
    assert (figures["attainment"], figures["low"], figures["high"], figures["goodput_per_s"]) == (None, 0.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("good", "total", "low", "high"),
    [
        # Newcombe (1998), Statistics in Medicine 17:857, table I, method 3 (score without continuity correction).
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 0.8830, 1.0),  # 29 / (29 + 1.95996 squared)
    ],
)
def test_wilson_interval_is_as_published(good: int, total: int, low: float, high: float) -> None:
    assert wilson_interval(good, total) == pytest.approx((low, high), abs=6e-5)


def test_presets_have_the_limits_of_mlperf() -> None:
    assert parse_slo("chat").describe() == {"ttft": 2000, "tpot": 200, "e2e": None}
    assert parse_slo("interactive").describe() == {"ttft": 500, "tpot": 30, "e2e": None}


def test_limits_are_spelled_as_in_vllm_and_are_their_own_name() -> None:
    assert parse_slo(" ttft:200  tpot:50 e2el:3000") == Slo("ttft:200 tpot:50 e2el:3000", 200.0, 50.0, 3000.0)
    assert parse_slo("tpot:12.5") == Slo("tpot:12.5", tpot=12.5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("chatty", "'chatty' is neither a preset nor a limit; allowed are chat, interactive, or limits in ms"),
        ("itl:20", "'itl:20' is neither a preset nor a limit"),
        ("ttft", "'ttft' is neither"),
        ("ttft:fast", "ttft is 'fast'; allowed is a number of milliseconds above 0"),
        ("tpot:0", "tpot is '0'; allowed is"),
        ("tpot:-3", "tpot is '-3'"),
        ("e2el:nan", "e2el is 'nan'"),
        ("e2el:inf", "e2el is 'inf'"),
        ("ttft:1 ttft:2", "ttft is given twice in 'ttft:1 ttft:2'"),
        ("", "no limit is given"),
    ],
)
def test_an_error_names_what_is_wrong_and_what_is_allowed(text: str, said: str) -> None:
    with pytest.raises(SlipstreamError) as error:
        parse_slo(text)
    assert str(error.value).startswith("slo: ")
    assert said in str(error.value)
