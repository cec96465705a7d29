"""Arrivals that are fixed in advance: kept whatever the server does, and every wait for it counts."""

from __future__ import annotations

import math
import time

import grpc
import numpy as np
import pytest

from fake_triton import Fail, FakeTriton, Received, Say, Wait, answer, ids_of_request
from loading import Loaded, load
from slipstream_client.comparison.request_figures import e2e_intended_ms
from slipstream_client.load.arrivals import OpenLoop, Replay
from slipstream_client.load.records import RequestRecord
from slipstream_client.load.workload import make_workload


def from_sent_ms(loaded: Loaded) -> list[float]:
    return [record.e2e_ms for record in loaded.records]


def from_intended_ms(loaded: Loaded) -> list[float]:
    return [e2e_intended_ms(record) for record in loaded.records]


def test_a_request_is_sent_at_its_time_though_those_before_it_are_not_answered(triton: FakeTriton) -> None:
    triton.script = lambda received: [Wait(0.6), *answer(ids_of_request(received))]
    loaded = load(triton, make_workload("fixed:2,2", 5), OpenLoop(10, burstiness=math.inf))
    assert [record.intended for record in loaded.records] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    sent_ms = [record.sent * 1000 for record in loaded.records]
    assert sent_ms == pytest.approx([100, 200, 300, 400, 500], abs=loaded.tolerance_ms)
    assert triton.most_in_flight == 5
    assert from_sent_ms(loaded) == pytest.approx([600] * 5, abs=loaded.tolerance_ms)


def test_a_trace_is_replayed_at_its_times(triton: FakeTriton) -> None:
    loaded = load(triton, make_workload("fixed:2,2", 4), Replay((0.0, 0.4, 0.4, 1.0), speed=2.0))
    assert [record.intended for record in loaded.records] == pytest.approx([0, 0.2, 0.2, 0.5])
    sent_ms = [record.sent * 1000 for record in loaded.records]
    assert sent_ms == pytest.approx([0, 200, 200, 500], abs=loaded.tolerance_ms)


def test_waiting_for_a_place_counts_from_the_intended_time_and_is_no_lag(triton: FakeTriton) -> None:
    triton.script = lambda received: [Wait(0.3), *answer(ids_of_request(received))]
    loaded = load(triton, make_workload("fixed:2,2", 6), Replay((0.0,) * 6, max_concurrency=2))
    assert triton.most_in_flight == 2
    assert [record.intended for record in loaded.records] == [0.0] * 6
    # Three rounds of 300 ms, each of which may come as late as its tolerance.
    assert from_sent_ms(loaded) == pytest.approx([300] * 6, abs=loaded.tolerance_ms)
    waited = [300, 300, 600, 600, 900, 900]
    assert from_intended_ms(loaded) == pytest.approx(waited, abs=3 * loaded.tolerance_ms)
    assert all(measured >= least for measured, least in zip(from_intended_ms(loaded), waited, strict=True))
    assert loaded.report.lag.sending is not None
    assert loaded.report.lag.sending.max < loaded.tolerance_ms


def test_a_server_that_stands_still_shows_in_latencies_from_the_intended_time(triton: FakeTriton) -> None:
    """BEN-12: 40 requests/s to a server that answers nothing from 1 s to 2 s, one place at the client.

    From its sending only the one request that stood with the server is late, one of 120. From the time at which they
    were due 40 are, by 1 s and 25 ms less each; the P99 of 120 values is 81 % of the way from the third largest to the
    second. What has piled up is sent before the next is due or a little later.
    """
    starts: list[float] = []

    def script(received: Received) -> list[Say | Fail | Wait]:
        now = time.monotonic()
        starts.append(now)
        since = now - starts[0]
        stall = [Wait(2.0 - since)] if 1.0 <= since < 2.0 else []
        return [*stall, *answer(ids_of_request(received))]

    triton.script = script
    arrivals = OpenLoop(40, burstiness=math.inf, max_concurrency=1)
    loaded = load(triton, make_workload("fixed:2,2", 120), arrivals)
    assert all(record.error is None for record in loaded.records)
    late = [value for value in from_sent_ms(loaded) if value > 500]
    assert late == pytest.approx([1000], abs=25 + loaded.tolerance_ms)
    assert np.percentile(from_sent_ms(loaded), 98) < 500
    assert np.percentile(from_intended_ms(loaded), 99) == pytest.approx(970, abs=50 + loaded.tolerance_ms)
    # Due in the middle of it.
    assert from_intended_ms(loaded)[60] >= 500


def test_a_client_that_batches_takes_what_has_arrived_when_its_last_batch_is_done(triton: FakeTriton) -> None:
    """The first alone, then the three that came meanwhile, then sixteen of the last twenty, then four."""
    triton.script = lambda received: [Wait(0.4 / len(texts_of(triton, received))), *answer([1, 2])]
    times = (0.0, 0.1, 0.15, 0.2, *(0.6,) * 20)
    loaded = load(triton, make_workload("fixed:2,2", 24), Replay(times), model="static")
    assert [len(received.texts) for received in triton.received] == [1, 3, 16, 4]
    assert triton.most_in_flight == 1
    assert [record.intended for record in loaded.records] == pytest.approx(times)
    assert loaded.records[1].sent == loaded.records[3].sent >= loaded.records[0].last
    assert loaded.report.lag.sending is not None
    assert loaded.report.lag.sending.max < loaded.tolerance_ms


def texts_of(triton: FakeTriton, row: Received) -> list[str]:
    """The batch that a row came in: it takes as long as one request does."""
    return next(received.texts for received in triton.received if received.id == row.id)


def test_a_batch_of_an_open_loop_is_no_larger_than_its_places(triton: FakeTriton) -> None:
    load(triton, make_workload("fixed:2,2", 8), Replay((0.0,) * 8, max_concurrency=4), model="static")
    assert [len(received.texts) for received in triton.received] == [4, 4]
    triton.received.clear()
    triton.script = lambda received: [Wait(0.02), *answer([1, 2])]
    triton.most_in_flight = 0
    load(triton, make_workload("fixed:2,2", 64), Replay((0.0,) * 64, max_concurrency=32), model="static")
    assert [len(received.texts) for received in triton.received] == [16] * 4
    assert triton.most_in_flight == 2


def test_a_retry_holds_its_place_and_counts_from_the_intended_time(triton: FakeTriton) -> None:
    def script(received: Received) -> list[Say | Fail | Wait]:
        refused = received.id.endswith("0") and received.attempt == 0
        return [Fail("full", grpc.StatusCode.UNAVAILABLE)] if refused else answer(ids_of_request(received))

    triton.script = script
    arrivals = Replay((0.0, 0.0), max_concurrency=1)
    loaded = load(triton, make_workload("fixed:2,2", 2), arrivals, retries=1, first_pause_s=0.3)
    first, second = loaded.records
    assert (first.retries, second.retries) == (1, 0)
    assert from_intended_ms(loaded) == pytest.approx([300, 300], abs=loaded.tolerance_ms)
    assert second.e2e_ms < 250


def test_every_request_of_a_burst_is_sent_and_recorded_once(triton: FakeTriton) -> None:
    records: list[RequestRecord] = load(triton, make_workload("fixed:2,2", 50), Replay((0.0,) * 50)).records
    assert [record.index for record in records] == list(range(50))
    assert len(triton.received) == 50
