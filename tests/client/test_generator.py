"""The closed loop over gRPC: what it sends, what it notes, and that nothing a server does wrong goes unseen."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest

from fake_triton import Fail, FakeTriton, Received, Say, Wait, answer, ids_of_request
from loading import load
from slipstream_client.comparison.request_figures import inter_chunk_ms, inter_token_ms, tpot_ms, ttft_ms
from slipstream_client.comparison.run_figures import run_figures
from slipstream_client.errors import SlipstreamError
from slipstream_client.load.arrivals import ClosedLoop
from slipstream_client.load.generator import LoadOptions, run_load
from slipstream_client.load.records import RequestRecord
from slipstream_client.load.targets import make_target
from slipstream_client.load.workload import make_workload


@pytest.mark.parametrize("model", ["continuous", "iterative", "dynamic", "continuous_unary"])
def test_every_request_is_sent_once_and_never_more_at_a_time_than_asked(triton: FakeTriton, model: str) -> None:
    triton.script = lambda received: [Wait(0.02), *answer(ids_of_request(received))]
    workload = make_workload("fixed:3,4", 12)
    records = load(triton, workload, ClosedLoop(3), model=model, run=f"{model}/fixed/c3/0").records
    assert [received.text for received in sorted(triton.received, key=lambda r: r.id)] == [
        request.text for request in workload.requests
    ]
    assert triton.most_in_flight == 3
    assert all(record.error is None for record in records)
    assert [record.output_tokens for record in records] == [4] * 12
    assert {record.id for record in records} == {f"{model}/fixed/c3/0/{index:05d}" for index in range(12)}
    assert {record.run for record in records} == {f"{model}/fixed/c3/0"}
    # With a salt for this run, so that it finds in no prefix cache what an earlier one has computed.
    samplings = [sampling for received in triton.received for sampling in received.sampling]
    (salt,) = {sampling.pop("cache_salt") for sampling in samplings}
    assert samplings[0] == workload.requests[0].sampling()
    load(triton, workload, ClosedLoop(3), model=model)
    assert triton.received[-1].sampling[0]["cache_salt"] != salt


def test_a_streaming_run_notes_every_chunk_with_its_time_and_tokens(triton: FakeTriton) -> None:
    ids = list(range(6))

    def script(received: Received) -> list[Say | Fail | Wait]:
        return [Say([]), Wait(0.4), Say(ids[:1]), Wait(0.3), Say(ids[1:5]), Wait(0.3), *answer(ids[5:])]

    triton.script = script
    loaded = load(triton, make_workload("fixed:2,6", 1))
    (record,) = loaded.records
    assert [tokens for _, tokens in record.chunks] == [0, 1, 4, 1]
    assert record.first == record.chunks[1][0]
    assert record.last == record.chunks[-1][0]
    assert record.output_tokens == 6
    assert ttft_ms(record) == pytest.approx(400, abs=loaded.tolerance_ms)
    assert inter_chunk_ms(record) == pytest.approx([300, 300], abs=loaded.tolerance_ms)
    assert inter_token_ms(record) == pytest.approx([75, 75, 75, 75, 300], abs=loaded.tolerance_ms)
    assert tpot_ms(record) == pytest.approx(600 / 5, abs=loaded.tolerance_ms / 5)
    assert record.e2e_ms == pytest.approx(1000, abs=loaded.tolerance_ms)
    assert record.stats == {"inference_ms": 1.0}
    assert record.output_ids == [5]


def test_a_batch_is_the_next_requests_in_order(triton: FakeTriton) -> None:
    workload = make_workload("mixed", 10)
    records = load(triton, workload, ClosedLoop(4), model="static").records
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
    load(triton, make_workload("fixed:2,2", 64), ClosedLoop(32), model="static")
    assert [len(received.texts) for received in triton.received] == [16] * 4
    assert triton.most_in_flight == 2


def test_times_of_a_batch_are_those_of_each_of_its_requests(triton: FakeTriton) -> None:
    """BEN-11: after one second of a batch of ten each has waited one second, none of them a tenth.

    Of a batch that comes back whole no first token is known, and none is made up.
    """
    triton.script = lambda received: [Wait(0.3), Say([1]), Wait(0.2), *answer([2])]
    workload = make_workload("fixed:2,2", 10)
    streamed = load(triton, workload, ClosedLoop(10))
    assert [ttft_ms(record) for record in streamed.records] == pytest.approx([300] * 10, abs=streamed.tolerance_ms)
    triton.script = lambda received: [Wait(0.05), *answer([1, 2])]  # rows of a batch are served one after the other
    batch = load(triton, workload, ClosedLoop(10), model="static")
    assert [len(received.texts) for received in triton.received[-1:]] == [10]
    assert [record.e2e_ms for record in batch.records] == pytest.approx([500] * 10, abs=2 * batch.tolerance_ms)
    assert all(record.e2e_ms >= 500 for record in batch.records)
    assert [ttft_ms(record) for record in batch.records] == [None] * 10


def test_a_failed_batch_fails_each_of_its_requests(triton: FakeTriton) -> None:
    triton.script = lambda received: [Fail("out of memory")]
    records = load(triton, make_workload("fixed:2,2", 2), ClosedLoop(4), model="static").records
    assert [(record.error, record.error_code) for record in records] == [("out of memory", "INTERNAL")] * 2


def test_an_error_mid_stream_keeps_what_came_before_it(triton: FakeTriton) -> None:
    def script(received: Received) -> list[Say | Fail | Wait]:
        ids = ids_of_request(received)
        bad = received.id.endswith("1")
        return [Say(ids[:3]), Fail("engine died", grpc.StatusCode.UNAVAILABLE)] if bad else answer(ids)

    triton.script = script
    records = load(triton, make_workload("fixed:2,5", 4), ClosedLoop(2)).records
    assert [record.error for record in records] == [None, "engine died", None, None]
    assert records[1].error_code == "UNAVAILABLE"
    assert records[1].output_tokens == 3
    assert records[1].last >= records[1].chunks[-1][0]


def test_unavailable_is_not_retried_unless_asked(triton: FakeTriton) -> None:
    triton.script = lambda received: [Fail("queue is full", grpc.StatusCode.UNAVAILABLE)]
    (record,) = load(triton, make_workload("fixed:2,5", 1)).records
    assert (record.error, record.retries, len(triton.received)) == ("queue is full", 0, 1)


def test_retries_back_off_are_counted_and_their_time_is_latency(triton: FakeTriton) -> None:
    def script(received: Received) -> list[Say | Fail | Wait]:
        if received.attempt < 2:
            return [Say([99]), Fail("queue is full", grpc.StatusCode.UNAVAILABLE)]
        return answer(ids_of_request(received))

    triton.script = script
    loaded = load(triton, make_workload("fixed:2,5", 1), retries=3, first_pause_s=0.1)
    (record,) = loaded.records
    assert (record.error, record.retries) == (None, 2)
    assert record.e2e_ms == pytest.approx(300, abs=loaded.tolerance_ms)  # pauses of 0.1 s and 0.2 s
    assert ttft_ms(record) == pytest.approx(300, abs=loaded.tolerance_ms)
    assert [tokens for _, tokens in record.chunks] == [1] * 5  # of the attempt that worked alone
    assert record.output_tokens == 5


def test_retries_run_out(triton: FakeTriton) -> None:
    triton.script = lambda received: [Fail("queue is full", grpc.StatusCode.UNAVAILABLE)]
    (record,) = load(triton, make_workload("fixed:2,5", 1), retries=2, first_pause_s=0.01).records
    assert (record.error, record.retries, len(triton.received)) == ("queue is full", 2, 3)


def test_only_unavailable_is_retried(triton: FakeTriton) -> None:
    triton.script = lambda received: [Fail("no such field", grpc.StatusCode.INVALID_ARGUMENT)]
    (record,) = load(triton, make_workload("fixed:2,5", 1), retries=5).records
    assert (record.error_code, record.retries) == ("INVALID_ARGUMENT", 0)


def test_a_stalled_request_fails_and_the_others_go_on(triton: FakeTriton) -> None:
    def script(received: Received) -> list[Say | Fail | Wait]:
        stalls = received.id.endswith("0")
        return [Say([1]), Wait(30.0)] if stalls else answer(ids_of_request(received))

    triton.script = script
    records = load(triton, make_workload("fixed:2,5", 3), ClosedLoop(2), timeout_s=0.3).records
    assert [record.error_code for record in records] == ["DEADLINE_EXCEEDED", None, None]


def test_an_answer_of_the_wrong_length_is_a_failure(triton: FakeTriton) -> None:
    """BEN-10: the lengths asked for may get lost on the way, and then nothing is what it is called."""
    triton.script = lambda received: answer(ids_of_request(received)[: 4 if received.id.endswith("1") else 5])
    records = load(triton, make_workload("fixed:2,5", 2)).records
    assert [record.error_code for record in records] == [None, "WRONG_LENGTH"]
    assert records[1].error == "the answer has 4 tokens where 5 were asked for"


def test_an_answer_without_a_token_is_a_failure_and_has_no_first_token(triton: FakeTriton) -> None:
    """BEN-02: every other answer is empty; no time to a first token is zero, or counted at all."""
    triton.script = lambda received: (
        [Wait(0.1), Say([], final=True)] if received.id[-1] in "13" else [Wait(0.6), *answer(ids_of_request(received))]
    )
    loaded = load(triton, make_workload("fixed:2,2", 4), ClosedLoop(4))
    assert [record.error_code for record in loaded.records] == [None, "EMPTY", None, "EMPTY"]
    assert [ttft_ms(record) is None for record in loaded.records] == [False, True, False, True]
    assert run_figures(loaded.records)["ttft_ms"]["p50"] == pytest.approx(600, abs=loaded.tolerance_ms)


def test_a_run_counts_every_kind_of_ending_and_only_good_answers_in_its_figures(triton: FakeTriton) -> None:
    """Nine at once, the first of which warms up; five tokens each, at 200 ms, and the last answer ends at 1 s."""

    def script(received: Received) -> list[Say | Fail | Wait]:
        ids = ids_of_request(received)
        return {
            "0": [Wait(0.1), *answer(ids)],
            "1": [Wait(0.2), *answer(ids, per_chunk=5)],
            "2": [Fail("queue is full", grpc.StatusCode.UNAVAILABLE)],
            "3": [Say(ids[:2]), Fail("stopped", grpc.StatusCode.CANCELLED)],
            "4": [Say([], final=True)],
            "5": answer(ids[:4]),
            "6": [Say(ids[:1]), Fail("engine died")],
            "7": [Fail("busy", grpc.StatusCode.UNAVAILABLE)] if not received.attempt else [Wait(0.2), *answer(ids)],
            "8": [Wait(0.2), Say(ids[:1]), Wait(0.8), *answer(ids[1:], per_chunk=4)],
        }[received.id[-1]]

    triton.script = script
    workload = make_workload("fixed:2,5", 9)
    loaded = load(triton, workload, ClosedLoop(9), warm_up=1, retries=1, first_pause_s=0.2)
    codes = [None, None, "UNAVAILABLE", "CANCELLED", "EMPTY", "WRONG_LENGTH", "INTERNAL", None, None]
    assert [record.error_code for record in loaded.records] == codes
    figures = run_figures(loaded.records)
    counts = {"requests": 8, "failures": 5, "refusals": 1, "cancelled": 1, "empty": 1, "retries": 2}
    assert {name: figures[name] for name in counts} == counts
    tolerance_ms = loaded.tolerance_ms
    assert figures["duration_s"] == pytest.approx(1.0, abs=tolerance_ms / 1000)
    assert figures["output_tokens_per_s"] * figures["duration_s"] == pytest.approx(15)
    assert figures["ttft_ms"]["mean"] == pytest.approx((200 + 400 + 200) / 3, abs=tolerance_ms)
    assert figures["e2e_ms"]["mean"] == pytest.approx((200 + 400 + 1000) / 3, abs=tolerance_ms)
    assert figures["tpot_ms"]["mean"] == pytest.approx((0 + 0 + 800 / 4) / 3, abs=tolerance_ms / 3)


def test_in_a_closed_loop_a_turn_comes_when_the_request_before_has_ended(triton: FakeTriton) -> None:
    triton.script = lambda received: [Wait(0.1), *answer(ids_of_request(received))]
    loaded = load(triton, make_workload("fixed:2,2", 3))
    first, second, third = loaded.records
    assert first.intended == 0
    assert first.last <= second.intended <= second.sent
    assert third.intended >= second.last
    assert (third.sent - third.intended) * 1000 < loaded.tolerance_ms


def test_the_clients_of_a_closed_loop_join_evenly(triton: FakeTriton) -> None:
    triton.script = lambda received: [Wait(1.0), *answer(ids_of_request(received))]
    loaded = load(triton, make_workload("fixed:2,2", 4), ClosedLoop(4, ramp_up_s=0.8))
    assert [record.intended for record in loaded.records] == pytest.approx([0, 0.2, 0.4, 0.6])
    sent_ms = [record.sent * 1000 for record in loaded.records]
    assert sent_ms == pytest.approx([0, 200, 400, 600], abs=loaded.tolerance_ms)


def test_a_client_that_has_joined_waits_for_none_that_has_not(triton: FakeTriton) -> None:
    loaded = load(triton, make_workload("fixed:2,2", 30), ClosedLoop(2, ramp_up_s=20.0))
    assert loaded.records[-1].last < 10.0  # the second client would have come then


def test_the_first_and_the_last_requests_are_marked(triton: FakeTriton) -> None:
    loaded = load(triton, make_workload("fixed:2,2", 6), ClosedLoop(2), warm_up=2, cool_down=1)
    assert [record.phase for record in loaded.records] == ["warm_up"] * 2 + ["measured"] * 3 + ["cool_down"]
    with pytest.raises(SlipstreamError, match="warm_up 4 and cool_down 2 leave none of 6 requests"):
        load(triton, make_workload("fixed:2,2", 6), warm_up=4, cool_down=2)


def test_cancelling_the_load_cancels_what_is_in_flight_and_keeps_what_ended(triton: FakeTriton) -> None:
    triton.script = lambda received: (
        [Say([1]), Wait(30.0)] if received.id.endswith("3") else answer(ids_of_request(received))
    )
    records: list[RequestRecord] = []

    async def send() -> None:
        async with make_target("grpc", triton.url, "continuous") as target:
            requests = make_workload("fixed:2,2", 6).requests
            task = asyncio.create_task(run_load(target, requests, LoadOptions("run", ClosedLoop(1)), records))
            deadline = time.monotonic() + 5
            while len(triton.received) < 4 and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(triton.cancel_seen.wait, 5)

    asyncio.run(send())
    assert [record.index for record in records] == [0, 1, 2]
    assert triton.cancelled == ["run/00003"]
