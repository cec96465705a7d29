"""The closed loop: what it sends, what it notes, and that nothing a server does wrong goes unseen."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest

from fake_triton import Fail, FakeTriton, Received, Say, Wait, answer, ids_of_request
from slipstream_client.aio import AsyncSlipstreamClient
from slipstream_client.comparison.run_figures import run_figures, tpot_ms, ttft_ms
from slipstream_client.load.generator import LoadOptions, run_load
from slipstream_client.load.records import RequestRecord
from slipstream_client.load.workload import Workload, make_workload


def run(triton: FakeTriton, workload: Workload, options: LoadOptions, timeout_s: float = 10.0) -> list[RequestRecord]:
    """Records in the order of the workload."""
    records: list[RequestRecord] = []

    async def load() -> None:
        async with AsyncSlipstreamClient(triton.url, options.batcher, timeout_s=timeout_s) as client:
            await run_load(client, workload.requests, options, records)

    asyncio.run(load())
    return sorted(records, key=lambda record: record.index)


@pytest.mark.parametrize("batcher", ["continuous", "iterative", "dynamic", "continuous_unary"])
def test_every_request_is_sent_once_and_never_more_at_a_time_than_asked(triton: FakeTriton, batcher: str) -> None:
    triton.script = lambda received: [Wait(0.02), *answer(ids_of_request(received))]
    workload = make_workload("fixed:3,4", 12)
    records = run(triton, workload, LoadOptions(batcher, 3))
    assert [received.text for received in sorted(triton.received, key=lambda r: r.id)] == [
        request.text for request in workload.requests
    ]
    assert triton.most_in_flight == 3
    assert all(record.error is None for record in records)
    assert [record.output_tokens for record in records] == [4] * 12
    assert {record.id for record in records} == {f"{batcher}-c3-{index:05d}" for index in range(12)}
    # With a salt for this run, so that it finds in no prefix cache what an earlier one has computed.
    samplings = [sampling for received in triton.received for sampling in received.sampling]
    (salt,) = {sampling.pop("cache_salt") for sampling in samplings}
    assert samplings[0] == workload.requests[0].sampling()
    run(triton, workload, LoadOptions(batcher, 3))
    assert triton.received[-1].sampling[0]["cache_salt"] != salt


def test_a_streaming_run_notes_every_chunk_with_its_time_and_tokens(triton: FakeTriton) -> None:
    ids = list(range(6))

    def script(received: Received) -> list[Say | Fail | Wait]:
        return [Say([]), Wait(0.1), Say(ids[:1]), Wait(0.1), Say(ids[1:5]), Wait(0.1), *answer(ids[5:])]

    triton.script = script
    (record,) = run(triton, make_workload("fixed:2,6", 1), LoadOptions("continuous", 1))
    assert [tokens for _, tokens in record.chunks] == [0, 1, 4, 1]
    times = [at for at, _ in record.chunks]
    assert times == sorted(times)
    assert record.first == record.chunks[1][0]
    assert record.last == record.chunks[-1][0]
    # Counted from sending, no sleep is short; what comes on top is the machine's.
    assert record.e2e_ms >= 300
    assert ttft_ms(record) == pytest.approx((record.first - record.sent) * 1e3)
    assert ttft_ms(record) >= 100
    assert tpot_ms(record) == pytest.approx((record.last - record.first) * 1e3 / 5)
    assert record.output_tokens == 6


def test_a_batch_is_the_next_requests_in_order(triton: FakeTriton) -> None:
    workload = make_workload("mixed", 10)
    records = run(triton, workload, LoadOptions("static", 4))
    assert [len(received.texts) for received in triton.received] == [4, 4, 2]
    sent = [text for received in triton.received for text in received.texts]
    assert sent == [request.text for request in workload.requests]
    assert [record.output_tokens for record in records] == [request.stop_length for request in workload.requests]
    assert records[0].last == records[3].last
    assert records[4].sent >= records[3].last
    assert all(record.first is None for record in records)
    assert triton.most_in_flight == 1


def test_more_clients_than_a_batch_holds_are_several_batches_at_once(triton: FakeTriton) -> None:
    triton.script = lambda received: [Wait(0.02), *answer(ids_of_request(received))]
    run(triton, make_workload("fixed:2,2", 64), LoadOptions("static", 32))
    assert [len(received.texts) for received in triton.received] == [16] * 4
    assert triton.most_in_flight == 2


def test_a_failed_batch_fails_each_of_its_requests(triton: FakeTriton) -> None:
    triton.script = lambda received: [Fail("out of memory")]
    records = run(triton, make_workload("fixed:2,2", 1), LoadOptions("static", 4))
    assert [(record.error, record.error_code) for record in records] == [("out of memory", "INTERNAL")]


def test_an_error_mid_stream_is_a_failure_that_no_figure_counts(triton: FakeTriton) -> None:
    def script(received: Received) -> list[Say | Fail | Wait]:
        ids = ids_of_request(received)
        bad = received.id.endswith("1")
        return [Say(ids[:3]), Fail("engine died", grpc.StatusCode.UNAVAILABLE)] if bad else answer(ids)

    triton.script = script
    options = LoadOptions("continuous", 2)
    records = run(triton, make_workload("fixed:2,5", 4), options)
    assert [record.error for record in records] == [None, "engine died", None, None]
    assert records[1].error_code == "UNAVAILABLE"
    assert records[1].output_tokens == 3
    figures = run_figures(options, records)
    assert figures["failures"] == 1
    assert figures["output_tokens_per_s"] * figures["duration_s"] == pytest.approx(15)


def test_unavailable_is_not_retried_unless_asked(triton: FakeTriton) -> None:
    triton.script = lambda received: [Fail("queue is full", grpc.StatusCode.UNAVAILABLE)]
    (record,) = run(triton, make_workload("fixed:2,5", 1), LoadOptions("continuous", 1))
    assert (record.error, record.retries, len(triton.received)) == ("queue is full", 0, 1)


def test_retries_back_off_are_counted_and_their_time_is_latency(triton: FakeTriton) -> None:
    def script(received: Received) -> list[Say | Fail | Wait]:
        if received.attempt < 2:
            return [Say([99]), Fail("queue is full", grpc.StatusCode.UNAVAILABLE)]
        return answer(ids_of_request(received))

    triton.script = script
    (record,) = run(triton, make_workload("fixed:2,5", 1), LoadOptions("continuous", 1, retries=3, first_pause_s=0.1))
    assert (record.error, record.retries) == (None, 2)
    assert record.e2e_ms >= 300  # pauses of 0.1 s and 0.2 s
    assert ttft_ms(record) >= 300
    assert [tokens for _, tokens in record.chunks] == [1] * 5  # of the attempt that worked alone
    assert record.output_tokens == 5


def test_retries_run_out(triton: FakeTriton) -> None:
    triton.script = lambda received: [Fail("queue is full", grpc.StatusCode.UNAVAILABLE)]
    options = LoadOptions("continuous", 1, retries=2, first_pause_s=0.01)
    (record,) = run(triton, make_workload("fixed:2,5", 1), options)
    assert (record.error, record.retries, len(triton.received)) == ("queue is full", 2, 3)


def test_only_unavailable_is_retried(triton: FakeTriton) -> None:
    triton.script = lambda received: [Fail("no such field", grpc.StatusCode.INVALID_ARGUMENT)]
    (record,) = run(triton, make_workload("fixed:2,5", 1), LoadOptions("continuous", 1, retries=5))
    assert (record.error_code, record.retries) == ("INVALID_ARGUMENT", 0)


def test_a_stalled_request_fails_and_the_others_go_on(triton: FakeTriton) -> None:
    def script(received: Received) -> list[Say | Fail | Wait]:
        stalls = received.id.endswith("0")
        return [Say([1]), Wait(30.0)] if stalls else answer(ids_of_request(received))

    triton.script = script
    records = run(triton, make_workload("fixed:2,5", 3), LoadOptions("continuous", 2), timeout_s=0.3)
    assert [record.error_code for record in records] == ["DEADLINE_EXCEEDED", None, None]


def test_an_answer_of_the_wrong_length_is_a_failure(triton: FakeTriton) -> None:
    triton.script = lambda received: answer(ids_of_request(received)[:-1])
    (record,) = run(triton, make_workload("fixed:2,5", 1), LoadOptions("continuous", 1))
    assert record.error == "the answer has 4 tokens where 5 were asked for"


def test_queue_time_is_what_the_engine_did_not_serve(triton: FakeTriton) -> None:
    triton.script = lambda received: [Wait(0.1), *answer(ids_of_request(received), inference_ms=30.0)]
    (record,) = run(triton, make_workload("fixed:2,5", 1), LoadOptions("dynamic", 1))
    assert record.queue_ms == pytest.approx(record.e2e_ms - 30.0)
    assert record.stats == {"inference_ms": 30.0}
    assert record.output_ids == ids_of_request(triton.received[0])


def test_in_a_closed_loop_a_turn_comes_when_the_request_before_has_ended(triton: FakeTriton) -> None:
    triton.script = lambda received: [Wait(0.05), *answer(ids_of_request(received))]
    first, second = run(triton, make_workload("fixed:2,2", 2), LoadOptions("continuous", 1))
    assert second.intended >= first.last
    assert second.sent - second.intended < 0.05


def test_cancelling_the_load_cancels_what_is_in_flight_and_keeps_what_ended(triton: FakeTriton) -> None:
    triton.script = lambda received: (
        [Say([1]), Wait(30.0)] if received.id.endswith("3") else answer(ids_of_request(received))
    )
    records: list[RequestRecord] = []

    async def load() -> None:
        async with AsyncSlipstreamClient(triton.url) as client:
            requests = make_workload("fixed:2,2", 6).requests
            task = asyncio.create_task(run_load(client, requests, LoadOptions("continuous", 1), records))
            deadline = time.monotonic() + 5
            while len(triton.received) < 4 and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(triton.cancel_seen.wait, 5)

    asyncio.run(load())
    assert [record.index for record in records] == [0, 1, 2]
    assert triton.cancelled == ["continuous-c1-00003"]
