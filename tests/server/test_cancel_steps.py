"""How soon a request is gone that nobody wants any more, in the engine's own steps.

The door learns within 100 ms that a client has left; the seat and the blocks are free one step after that. Where the
door cannot be asked when it knew, several tries are made and the quickest counts: a busy machine only makes them later.
"""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

import pytest

from helpers import PROMPTS, GrpcStream, Refused, ask, events_of, generate, generate_body
from observing import engine_status, finished, others_running, step_records, wait_until
from slipstream_client.server.tritonserver import TritonServer

pytestmark = pytest.mark.server

SEATS = 16
# Of the door asking whether a client has left.
POLL_S = 0.1
TRIES = 3
# The step that the cancellation comes into, and one more for its way from the door to the engine.
STEPS = 2
# Chunks of this prompt are computed for seconds.
LONG_PROMPT = "a" + " a" * 3000
# Nothing but the cancellation ends these within the time that a test waits.
ENDLESS = {"max_tokens": 4000, "ignore_eos": True}
# Stamps of the engine and arithmetic on milliseconds with three decimals.
ROUNDING_S = 1e-5


def end_the_stream(server: TritonServer, victim: GrpcStream) -> float:
    """The time by which the door has to know."""
    cancelled_at = monotonic()
    victim.cancel()
    return cancelled_at + POLL_S


def ask_to_cancel(server: TritonServer, victim: GrpcStream) -> float:
    """The time by which the door has to know: it has answered."""
    assert generate(server, "continuous", {"id": "victim", "cancel": True})[0] == 200
    known_by = monotonic()
    with pytest.raises(Refused, match="Request was cancelled"):
        victim.collect()
    victim.close()
    return known_by


WAYS: Mapping[str, Callable[[TritonServer, GrpcStream], float]] = {
    "the client ends its stream": end_the_stream,
    "a request asks for it": ask_to_cancel,
}


def send_victim(server: TritonServer, **sampling: Any) -> GrpcStream:
    prompt = sampling.pop("prompt", PROMPTS[0])
    return GrpcStream(server).send("continuous", prompt, request_id="victim", **ENDLESS, **sampling)


def wait_until_gone(server: TritonServer) -> None:
    """Wait for the seat of the only request; its blocks are free in the same moment."""

    def seat_is_free() -> bool:
        status = engine_status(server, "continuous")
        assert status["running"] or status["kv_blocks_used"] == 0
        return status["running"] == 0

    wait_until(seat_is_free, "the seat is free")


@pytest.mark.parametrize("cancel", WAYS.values(), ids=WAYS.keys())
def test_a_request_that_decodes_is_gone_one_step_after_the_door_knows(
    server: TritonServer, cancel: Callable[[TritonServer, GrpcStream], float]
) -> None:
    before, late = finished(server, "continuous", "cancelled"), []
    for _ in range(TRIES):
        victim = send_victim(server)
        for _ in range(3):
            victim.receive()
        known_by = cancel(server, victim)
        wait_until_gone(server)
        # It is the only one: with it the steps end.
        late.append(len(step_records(server, since=known_by)))
    assert min(late) <= STEPS, late
    assert finished(server, "continuous", "cancelled") == before + TRIES


@pytest.mark.parametrize("cancel", WAYS.values(), ids=WAYS.keys())
def test_a_request_in_its_long_prefill_is_gone_one_step_after_the_door_knows(
    server: TritonServer, cancel: Callable[[TritonServer, GrpcStream], float]
) -> None:
    before, late = finished(server, "continuous", "cancelled"), []
    for number in range(TRIES):
        sent = monotonic()
        victim = send_victim(server, prompt=LONG_PROMPT, cache_salt=f"{sent} {number}")
        wait_until(lambda sent=sent: step_records(server, since=sent), "its first chunk has been computed")
        known_by = cancel(server, victim)
        wait_until_gone(server)
        assert sum(record["sampled_rows"] for record in step_records(server, since=sent)) == 0, "it was a prefill"
        late.append(len(step_records(server, since=known_by)))
    assert min(late) <= STEPS, late
    assert finished(server, "continuous", "cancelled") == before + TRIES


@pytest.mark.parametrize("cancel", WAYS.values(), ids=WAYS.keys())
def test_a_request_that_waits_is_gone_one_step_after_the_door_knows(
    server: TritonServer, cancel: Callable[[TritonServer, GrpcStream], float]
) -> None:
    before, late = finished(server, "continuous", "cancelled"), []
    with others_running(server, SEATS):
        for _ in range(TRIES):
            sent = monotonic()
            victim = send_victim(server)
            wait_until(lambda: engine_status(server, "continuous")["waiting"] == 1, "it waits")
            known_by = cancel(server, victim)
            wait_until(lambda: engine_status(server, "continuous")["waiting"] == 0, "it waits no more")
            late.append(sum(record["waiting"] for record in step_records(server, since=known_by)))
            assert {record["running"] for record in step_records(server, since=sent)} == {SEATS}
    assert min(late) <= STEPS, late
    assert finished(server, "continuous", "cancelled") == before + TRIES + SEATS


@pytest.mark.parametrize("prompt", [PROMPTS[1], LONG_PROMPT], ids=["decoding", "in a long prefill"])
def test_no_step_begun_after_the_deadline_computes_the_request(server: TritonServer, prompt: str) -> None:
    sent, timeout_s = monotonic(), 1.0
    answer = ask(server, "continuous", prompt, timeout_ms=1000 * timeout_s, cache_salt=f"{sent}", **ENDLESS)
    assert answer.finish_reason == "timeout"
    *computing, last = step_records(server, since=sent)
    deadline = computing[0]["start_s"] - answer.stats["queue_ms"] / 1000 + timeout_s
    assert computing[-1]["start_s"] <= deadline + ROUNDING_S
    assert last["start_s"] > deadline - ROUNDING_S
    assert (last["running"], last["kv_blocks_used"], last["prefill_rows"], last["decode_rows"]) == (0, 0, 0, 0)
    assert answer.num_output_tokens == sum(record["sampled_rows"] for record in computing)
    assert (answer.num_output_tokens == 0) == (prompt == LONG_PROMPT)


def test_a_deadline_in_the_queue_is_kept_to_the_step(server: TritonServer) -> None:
    with others_running(server, SEATS):
        sent = monotonic()
        with pytest.raises(Refused, match=r"still in the queue after [\d.]+ s; 0.3 s were allowed") as error:
            ask(server, "continuous", PROMPTS[0], timeout_ms=300)
        # The step that ended it is recorded when it is over, and the refusal was there before.
        refused = monotonic()
        wait_until(lambda: step_records(server, since=refused), "a step has begun and ended since the refusal")
        records = step_records(server, since=sent)
    waited_s = float(error.value.text.partition(" after ")[2].partition(" s;")[0])
    assert waited_s >= 0.3
    waiting = [index for index, record in enumerate(records) if record["waiting"]]
    ended = records[waiting[-1] + 1]
    deadline = ended["start_s"] - waited_s + 0.3
    # The text has milliseconds.
    assert records[waiting[-1]]["start_s"] <= deadline + 0.001
    assert {record["running"] for record in records} == {SEATS}


def test_a_client_that_hangs_up_on_generate_stream_is_noticed_at_the_next_write(server: TritonServer) -> None:
    """So in a long prefill, which writes nothing, only after it."""
    before, late = finished(server, "continuous", "cancelled"), []
    for _ in range(TRIES):
        known_by = hang_up(server, PROMPTS[0], after_events=3) + POLL_S
        wait_until_gone(server)
        late.append(len(step_records(server, since=known_by)))
    # One more for the write.
    assert min(late) <= STEPS + 1, late
    sent = monotonic()
    hang_up(server, "a" + " a" * 600, after_events=0)
    wait_until_gone(server)
    sampled = sum(record["sampled_rows"] for record in step_records(server, since=sent))
    assert sampled < ENDLESS["max_tokens"] / 10
    assert finished(server, "continuous", "cancelled") == before + TRIES + 1


def hang_up(server: TritonServer, prompt: str, after_events: int) -> float:
    """Ask for a stream, take so many events of it, and close the connection; the time of the deed."""
    sent = monotonic()
    with contextlib.closing(http.client.HTTPConnection(server.http_url, timeout=30)) as connection:
        body = generate_body("continuous", prompt, stream=True, cache_salt=f"{sent}", **ENDLESS)
        connection.request("POST", "/v2/models/continuous/generate_stream", json.dumps(body))
        if after_events:
            answer = connection.getresponse()
            events = events_of(answer)
            for _ in range(after_events):
                next(events)
            answer.close()
        else:
            wait_until(lambda: step_records(server, since=sent), "its first chunk has been computed")
        return monotonic()
