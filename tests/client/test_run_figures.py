"""The figures of a run by hand-made records whose right values can be read off."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream_client.comparison.engine_metrics import EngineFigures
from slipstream_client.comparison.quality import compare_answers, first_difference
from slipstream_client.comparison.resources import ProcessFigures
from slipstream_client.comparison.run_figures import (
    inter_chunk_ms,
    inter_token_ms,
    run_figures,
    summarise,
    tpot_ms,
    ttft_ms,
)
from slipstream_client.load.generator import LoadOptions
from slipstream_client.load.records import RequestRecord

OPTIONS = LoadOptions("continuous", 2)


def record(index: int = 0, *, sent: float = 1.0, chunks: Any = (), streams: bool = True, **more: Any) -> RequestRecord:
    carrying = [at for at, tokens in chunks if tokens]
    fields: dict[str, Any] = {
        "id": f"r{index}",
        "batcher": "continuous",
        "executor": "native",
        "concurrency": 2,
        "index": index,
        "intended": sent,
        "sent": sent,
        "first": carrying[0] if streams and carrying else None,
        "last": chunks[-1][0] if chunks else None,
        "chunks": list(chunks),
        "output_tokens": sum(tokens for _, tokens in chunks),
    }
    return RequestRecord(**fields | more)


# An empty chunk first, then 1, 3 and 1 tokens, and an empty last response.
STREAMED = record(sent=1.0, chunks=[(1.1, 0), (1.5, 1), (1.8, 3), (2.0, 1), (2.5, 0)])


def test_ttft_is_of_the_first_chunk_that_carries_a_token() -> None:
    assert ttft_ms(STREAMED) == pytest.approx(500)


def test_tpot_divides_by_real_tokens_less_one() -> None:
    assert tpot_ms(STREAMED) == pytest.approx((2.0 - 1.5) * 1000 / 4)
    assert tpot_ms(record(chunks=[(1.5, 1)])) is None


def test_itl_is_per_token_and_icl_per_chunk() -> None:
    assert inter_token_ms(STREAMED) == pytest.approx([100, 100, 100, 200])
    assert inter_chunk_ms(STREAMED) == pytest.approx([300, 200])


def test_percentiles_are_linear() -> None:
    assert summarise([0.0, 10.0]) == {"mean": 5.0, "p50": 5.0, "p90": 9.0, "p99": pytest.approx(9.9)}
    assert summarise([]) is None


def test_failures_count_in_the_window_and_in_nothing_else() -> None:
    good = record(0, sent=1.0, chunks=[(2.0, 1), (3.0, 1)], queue_ms=40.0)
    early = record(1, sent=0.0, chunks=[(0.5, 1)], last=0.6, error="queue is full")
    late = record(2, sent=2.0, chunks=[(2.1, 7)], last=11.0, error="stalled", retries=2)
    run = run_figures(OPTIONS, [good, early, late])
    assert (run["requests"], run["failures"], run["retries"]) == (3, 2, 2)
    assert run["duration_s"] == pytest.approx(11.0)
    assert run["output_tokens_per_s"] == pytest.approx(2 / 11)
    assert run["requests_per_s"] == pytest.approx(1 / 11)
    assert run["e2e_ms"]["mean"] == pytest.approx(2000)
    assert run["ttft_ms"]["p99"] == pytest.approx(1000)
    assert run["queue_ms"]["mean"] == 40.0


def test_a_batcher_that_does_not_stream_has_no_token_latencies() -> None:
    run = run_figures(OPTIONS, [record(chunks=[(3.0, 5)], streams=False)])
    assert run["ttft_ms"] is run["itl_ms"] is run["icl_ms"] is run["tpot_ms"] is None
    assert run["e2e_ms"]["mean"] == pytest.approx(2000)


def test_a_run_of_failures_alone_has_no_latency_and_no_throughput() -> None:
    run = run_figures(OPTIONS, [record(error="no server", last=1.0)])
    assert (run["output_tokens_per_s"], run["e2e_ms"], run["failures"]) == (0.0, None, 1)


def test_a_run_has_every_key_of_the_schema() -> None:
    engine = EngineFigures(useful_tokens=90, computed_tokens=100, padding_fraction=0.1, kv_waste_fraction=0.2)
    run = run_figures(OPTIONS, [STREAMED], engine, ProcessFigures(150.0, 1000))
    wanted = """batcher executor concurrency requests failures duration_s output_tokens_per_s requests_per_s ttft_ms
    itl_ms tpot_ms e2e_ms queue_ms useful_tokens computed_tokens padding_fraction kv_waste_fraction kv_peak_blocks
    cpu_percent rss_bytes"""
    assert set(wanted.split()) <= set(run)
    assert (run["batcher"], run["executor"], run["concurrency"]) == ("continuous", "native", 2)
    assert (run["useful_tokens"], run["cpu_percent"], run["tokens_per_chunk"]) == (90, 150.0, pytest.approx(5 / 3))


def test_equal_answers_are_equal_and_failed_ones_are_not_compared() -> None:
    answers = [
        record(0, output_ids=[1, 2]),
        record(0, output_ids=[1, 2], batcher="dynamic"),
        record(1, output_ids=[3]),
        record(1, output_ids=[4], batcher="dynamic", error="late"),
    ]
    assert compare_answers(answers) == {"equal": True, "compared": 1, "different": []}


def test_a_different_answer_is_listed_with_the_first_token_that_differs() -> None:
    one, other = record(0, output_ids=[1, 2, 3]), record(0, output_ids=[1, 2, 9], id="r0-dynamic")
    assert compare_answers([one, other]) == {
        "equal": False,
        "compared": 1,
        "different": [{"request": "r0-dynamic", "reference": "r0", "first_difference": 2}],
    }
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_nothing_to_compare_is_neither_equal_nor_different() -> None:
    assert compare_answers([record(0, output_ids=[1])])["equal"] is None
