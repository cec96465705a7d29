"""The figures of a run by hand-made records whose right values can be read off."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from recorded import record
from slipstream_client.comparison.request_figures import (
    e2e_intended_ms,
    inter_chunk_ms,
    inter_token_ms,
    queue_ms,
    tpot_ms,
    ttft_intended_ms,
    ttft_ms,
)
from slipstream_client.comparison.run_figures import run_figures, summarise, window_s
from slipstream_client.comparison.slo import PRESETS
from slipstream_client.comparison.steady_state import steady_state, token_counts
from slipstream_client.load.records import RequestRecord, write_records

# An empty chunk first, then 1, 3 and 1 tokens, and an empty last response.
STREAMED = record(sent=1.0, intended=0.75, chunks=[(1.1, 0), (1.5, 1), (1.8, 3), (2.0, 1), (2.5, 0)])


def test_ttft_is_of_the_first_chunk_that_carries_a_token() -> None:
    assert ttft_ms(STREAMED) == pytest.approx(500)


def test_what_a_request_waited_at_the_client_counts_from_its_intended_time() -> None:
    assert STREAMED.e2e_ms == pytest.approx(1500)
    assert e2e_intended_ms(STREAMED) == pytest.approx(1750)
    assert ttft_intended_ms(STREAMED) == pytest.approx(750)


def test_tpot_divides_by_real_tokens_less_one() -> None:
    assert tpot_ms(STREAMED) == pytest.approx((2.0 - 1.5) * 1000 / 4)
    assert tpot_ms(record(chunks=[(1.5, 1)])) is None


def test_itl_is_per_token_and_icl_per_chunk() -> None:
    assert inter_token_ms(STREAMED) == pytest.approx([100, 100, 100, 200])
    assert inter_chunk_ms(STREAMED) == pytest.approx([300, 200])


def test_queue_is_the_time_without_service_and_never_below_zero() -> None:
    assert queue_ms(record(chunks=[(3.0, 5)], stats={"inference_ms": 1500.0})) == pytest.approx(500)
    assert queue_ms(record(chunks=[(3.0, 5)], stats={"inference_ms": 2000.5})) == 0.0
    assert queue_ms(record(chunks=[(3.0, 5)])) is queue_ms(record(chunks=[(3.0, 5)], stats={})) is None


def test_percentiles_are_linear() -> None:
    assert summarise([0.0, 10.0]) == {"mean": 5.0, "p50": 5.0, "p90": 9.0, "p99": pytest.approx(9.9)}
    assert summarise([]) is None


def test_failures_count_in_the_window_and_in_nothing_else() -> None:
    good = record(0, sent=1.0, chunks=[(2.0, 1), (3.0, 1)], stats={"inference_ms": 1960.0}, input_tokens=8)
    early = record(1, sent=0.0, chunks=[(0.5, 1)], last=0.6, error="queue is full", input_tokens=90)
    late = record(2, sent=2.0, chunks=[(2.1, 7)], last=11.0, error="stalled", retries=2)
    run = run_figures([good, early, late])
    assert (run["requests"], run["failures"], run["retries"]) == (3, 2, 2)
    assert run["duration_s"] == pytest.approx(11.0)
    assert run["output_tokens_per_s"] == pytest.approx(2 / 11)
    assert run["input_tokens_per_s"] == pytest.approx(8 / 11)
    assert run["requests_per_s"] == pytest.approx(1 / 11)
    assert run["e2e_ms"]["mean"] == pytest.approx(2000)
    assert run["ttft_ms"]["p99"] == pytest.approx(1000)
    assert run["queue_ms"]["mean"] == pytest.approx(40.0)
    assert run["tokens_per_chunk"] == 1.0


def test_kinds_of_failures_are_parts_of_them() -> None:
    codes = ["UNAVAILABLE", "UNAVAILABLE", "CANCELLED", "EMPTY", "INTERNAL", "WRONG_LENGTH"]
    failed = [record(at, last=2.0, error="failed", error_code=code) for at, code in enumerate(codes)]
    recovered = record(9, chunks=[(2.0, 1)], retries=1)
    run = run_figures([*failed, recovered])
    assert run["failures"] == 6
    assert (run["refusals"], run["cancelled"], run["empty"]) == (2, 1, 1)


def test_a_request_that_never_ended_is_a_failure() -> None:
    run = run_figures([record(0, chunks=[(2.0, 1)]), record(1, sent=1.5), record(2, sent=None, intended=1.7)])
    assert (run["requests"], run["failures"], run["duration_s"]) == (3, 2, pytest.approx(1.0))


def test_warm_up_and_cool_down_count_in_no_figure() -> None:
    before = record(0, sent=0.0, chunks=[(9.0, 50)], phase="warm_up")
    middle = record(1, sent=5.0, chunks=[(6.0, 2), (10.0, 2)])
    after = record(2, sent=6.0, chunks=[(30.0, 50)], phase="cool_down", retries=3)
    whole, alone = run_figures([before, middle, after]), run_figures([middle])
    del whole["steady_state"], alone["steady_state"]  # the server worked on all of them
    assert whole == alone
    assert (whole["requests"], whole["duration_s"], whole["output_tokens_per_s"]) == (1, 5.0, pytest.approx(4 / 5))


def test_a_batcher_that_does_not_stream_has_no_token_latencies() -> None:
    run = run_figures([record(chunks=[(3.0, 5)], streams=False)])
    assert run["ttft_ms"] is run["ttft_intended_ms"] is run["itl_ms"] is run["icl_ms"] is run["tpot_ms"] is None
    assert run["tokens_per_chunk"] is None
    assert run["e2e_ms"]["mean"] == pytest.approx(2000)


def test_a_run_of_failures_alone_has_no_latency_and_no_throughput() -> None:
    run = run_figures([record(error="no server", last=1.0)], [PRESETS["chat"]])
    assert (run["output_tokens_per_s"], run["e2e_ms"], run["failures"]) == (0.0, None, 1)
    assert run["slo"]["chat"]["attainment"] == run["slo"]["chat"]["goodput_per_s"] == 0.0


def test_a_run_without_measured_requests_has_no_figures() -> None:
    run = run_figures([record(chunks=[(2.0, 1)], phase="warm_up")], [PRESETS["chat"]])
    assert (run["requests"], run["duration_s"], run["output_tokens_per_s"], run["steady_state"]) == (0, 0.0, 0.0, None)
    assert run["slo"]["chat"]["attainment"] is None


def test_input_tokens_that_a_server_does_not_count_are_unknown() -> None:
    assert (
        run_figures([record(0, chunks=[(2.0, 1)], input_tokens=4), record(1, chunks=[(2.0, 1)])])["input_tokens_per_s"]
        is None
    )


def test_figures_follow_from_the_lines_on_disk(tmp_path: Path) -> None:
    records = [STREAMED, record(1, chunks=[(3.0, 5)], streams=False), record(2, last=2.0, error="late")]
    write_records(tmp_path / "requests.jsonl", records)
    lines = (tmp_path / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    read = [RequestRecord(**json.loads(line)) for line in lines]
    assert run_figures(read, list(PRESETS.values())) == run_figures(records, list(PRESETS.values()))
    assert window_s(read) == pytest.approx(2.0)


def test_streamed_tokens_count_when_they_came_and_whole_answers_evenly() -> None:
    streamed = record(0, sent=0.0, chunks=[(0.5, 1), (1.5, 4), (3.0, 2)])
    whole = record(1, sent=1.0, chunks=[(4.0, 30)], streams=False)
    assert token_counts([streamed, whole], np.array([0.0, 1.0, 2.0, 4.0])) == pytest.approx([1, 4 + 10, 2 + 20])
    assert token_counts([], np.array([0.0, 1.0])) == pytest.approx([0])


def test_steady_state_is_the_longest_span_near_the_peak() -> None:
    # In flight: 1 from 0, 2 from 1, 1 from 5, 2 from 6, 1 from 8, 0 from 10.
    records = [
        record(0, sent=0.0, chunks=[(0.5, 7), (2.0, 3), (5.0, 1)]),
        record(1, sent=1.0, chunks=[(1.5, 2), (8.0, 90)]),
        record(2, sent=6.0, chunks=[(10.0, 60)]),
    ]
    assert steady_state(records) == {
        "output_tokens_per_s": pytest.approx((3 + 1 + 2) / 4),
        "from_s": 1.0,
        "to_s": 5.0,
        "in_flight": 2,
    }


def test_a_short_dip_between_batches_does_not_end_the_steady_state() -> None:
    def batches(gap: float) -> list[RequestRecord]:
        starts = (0.0, 4.0 + gap)
        return [record(at, sent=s, chunks=[(s + 4.0, 8)], streams=False) for at, s in enumerate(starts) for _ in "ab"]

    dipped, apart = steady_state(batches(0.05)), steady_state(batches(0.5))
    assert dipped is not None
    assert apart is not None
    assert (dipped["from_s"], dipped["to_s"]) == (0.0, pytest.approx(8.05))
    assert dipped["output_tokens_per_s"] == pytest.approx(32 / 8.05)
    assert (apart["from_s"], apart["to_s"], apart["output_tokens_per_s"]) == (0.0, 4.0, pytest.approx(16 / 4))


def test_steady_state_counts_requests_of_every_phase_inside_the_measured_window() -> None:
    warm = record(0, sent=0.0, chunks=[(1.0, 5), (3.0, 6)], phase="warm_up")
    middle = record(1, sent=2.0, chunks=[(2.5, 2), (4.0, 3)])
    cool = record(2, sent=3.0, chunks=[(4.0, 4), (9.0, 5)], phase="cool_down")
    found = steady_state([warm, middle, cool])
    assert found == {
        "output_tokens_per_s": pytest.approx((6 + 2 + 3 + 4) / 2),
        "from_s": 2.0,
        "to_s": 4.0,
        "in_flight": 2,
    }


def test_a_failed_request_is_in_flight_but_gives_no_tokens() -> None:
    failed = record(1, sent=0.0, chunks=[(1.0, 40)], last=2.0, error="stalled")
    found = steady_state([record(0, sent=0.0, chunks=[(2.0, 6)]), failed])
    assert found is not None
    assert (found["in_flight"], found["output_tokens_per_s"]) == (2, pytest.approx(3.0))


def test_a_window_without_length_has_no_steady_state() -> None:
    assert steady_state([record(sent=2.0, chunks=[(2.0, 1)])]) is None
    assert run_figures([record(sent=2.0, chunks=[(2.0, 1)])])["output_tokens_per_s"] == 0.0
