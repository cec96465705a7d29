"""A client that no longer wants its answer: the request ends at once, is counted once, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio

from helpers import (
    CAUGHT,
    LONG,
    NUM_GOLDEN,
    PROMPTS,
    STREAMING,
    GrpcStream,
    Refused,
    ask,
    events_of,
    flag_tensor,
    generate,
    generate_body,
    inputs_for,
    sampling_json,
)
from observing import (
    Metrics,
    finished,
    occupancy,
    others_running,
    step_records,
    wait_for_gauge,
    wait_for_running,
    wait_until,
    wait_until_at_rest,
)
from slipstream_client.aio import AsyncSlipstreamClient
from slipstream_client.client import SlipstreamClient
from slipstream_client.server.triton_http import TritonHttp
from slipstream_client.server.tritonserver import TritonServer

pytestmark = pytest.mark.server

SEATS = 16
PROMPT = PROMPTS[0]


def wait_until_cancelled(server: TritonServer, engine: str, number: float) -> None:
    what = f"{number:g} requests of {engine} are cancelled"
    wait_until(lambda: Metrics(server).finished(engine, "cancelled") >= number, what)


@contextlib.contextmanager
def cancelled_once(server: TritonServer, engine: str, golden: dict[str, list[int]], count: int = 1) -> Iterator[None]:
    """What happens inside ends `count` requests as cancelled, frees what they held, and leaves the engine working."""
    wait_until_at_rest(server, [engine])
    before = Metrics(server)
    yield
    wait_until_cancelled(server, engine, before.finished(engine, "cancelled") + count)
    assert ask(server, engine, PROMPTS[1], max_tokens=4).ids == golden[PROMPTS[1]][:4]
    wait_until_at_rest(server, [engine])
    after = Metrics(server)
    assert after.finished(engine, "cancelled") == before.finished(engine, "cancelled") + count
    assert after.finished(engine, "length") == before.finished(engine, "length") + 1


@pytest.mark.parametrize("model", STREAMING)
def test_cancelling_the_response_iterator_ends_the_request(
    server: TritonServer, golden: dict[str, list[int]], model: str
) -> None:
    async def two_chunks_then_cancel() -> list[str]:
        async with triton_grpc_aio.InferenceServerClient(server.grpc_url) as client:

            async def requests():  # type: ignore[no-untyped-def]
                yield {"model_name": model, "inputs": inputs_for(model, PROMPT, sampling_json(**LONG))}

            responses = client.stream_infer(requests())
            texts = []
            async for result, error in responses:
                assert error is None
                texts.append(result.as_numpy("text_output").ravel()[0].decode())
                if len(texts) == 2:
                    responses.cancel()
                    return texts
        return texts

    with cancelled_once(server, model, golden):
        assert len(asyncio.run(two_chunks_then_cancel())) == 2


@pytest.mark.parametrize("model", STREAMING)
def test_stopping_a_stream_with_cancel_requests_ends_the_request(
    server: TritonServer, golden: dict[str, list[int]], model: str
) -> None:
    with cancelled_once(server, model, golden):
        stream = GrpcStream(server).send(model, PROMPT, **LONG)
        stream.receive()
        stream.cancel()


def test_a_cancelled_stream_takes_all_its_requests_with_it(server: TritonServer, golden: dict[str, list[int]]) -> None:
    with cancelled_once(server, "continuous", golden, count=3):
        stream = GrpcStream(server)
        for number in range(3):
            stream.send("continuous", PROMPTS[number], request_id=str(number), **LONG)
        wait_for_running(server, "continuous", 3)
        stream.cancel()


@pytest.mark.parametrize("model", ["continuous_unary", "dynamic"])
def test_cancelling_a_plain_inference_call_ends_the_request(
    server: TritonServer, golden: dict[str, list[int]], model: str
) -> None:
    engine = "continuous" if model == "continuous_unary" else model
    with cancelled_once(server, engine, golden), triton_grpc.InferenceServerClient(server.grpc_url) as client:
        call = client.async_infer(model, inputs_for(model, PROMPT, sampling_json(**LONG)), lambda result, error: None)
        wait_for_running(server, engine, 1)
        call.cancel()


def test_cancelling_one_request_of_a_dynamic_batch_leaves_the_others_their_answers(
    server: TritonServer, golden: dict[str, list[int]]
) -> None:
    with triton_grpc.InferenceServerClient(server.grpc_url) as client, GrpcStream(server) as stream:
        before = finished(server, "dynamic", "cancelled")
        call = client.async_infer(
            "dynamic", inputs_for("dynamic", PROMPT, sampling_json(**LONG)), lambda result, error: None
        )
        stream.send("dynamic", PROMPTS[1], **CAUGHT)
        wait_for_running(server, "dynamic", 2)
        call.cancel()
        answer = stream.answer()
    assert answer.ids[:NUM_GOLDEN] == golden[PROMPTS[1]]
    assert finished(server, "dynamic", "cancelled") == before + 1


def test_the_cancel_input_ends_the_request_with_that_id_and_no_other(
    server: TritonServer, golden: dict[str, list[int]]
) -> None:
    before = finished(server, "continuous", "cancelled")
    with GrpcStream(server) as victim, GrpcStream(server) as neighbour, GrpcStream(server) as canceller:
        neighbour.send("continuous", PROMPTS[2], request_id="neighbour", **CAUGHT)
        victim.send("continuous", PROMPT, request_id="victim", **LONG)
        assert victim.receive().request_id == "victim"
        canceller.send("continuous", inputs=[flag_tensor("cancel")], request_id="victim")
        assert [(response.text, response.final) for response in canceller.collect()] == [("", True)]
        with pytest.raises(Refused) as error:
            victim.collect()
        assert error.value.text == "Request was cancelled"
        assert neighbour.answer().ids[:NUM_GOLDEN] == golden[PROMPTS[2]]
    assert finished(server, "continuous", "cancelled") == before + 1


def test_over_http_the_cancel_input_ends_the_request_with_an_error(server: TritonServer) -> None:
    with contextlib.closing(http.client.HTTPConnection(server.http_url, timeout=30)) as connection:
        body = {**generate_body("continuous", PROMPT, **LONG), "id": "by-http"}
        connection.request("POST", "/v2/models/continuous/generate", json.dumps(body))
        wait_for_running(server, "continuous", 1)
        assert generate(server, "continuous", {"id": "by-http", "cancel": True})[0] == 200
        answer = connection.getresponse()
        assert (answer.status, json.load(answer)) == (400, {"error": "CANCELLED: Request was cancelled"})


def test_a_cancelled_sse_stream_ends_with_an_error_event(server: TritonServer) -> None:
    with contextlib.closing(http.client.HTTPConnection(server.http_url, timeout=30)) as connection:
        body = {**generate_body("continuous", PROMPT, stream=True, **LONG), "id": "by-sse"}
        connection.request("POST", "/v2/models/continuous/generate_stream", json.dumps(body))
        events = events_of(connection.getresponse())
        assert next(events)["finish_reason"] == ""
        assert generate(server, "continuous", {"id": "by-sse", "cancel": True})[0] == 200
        assert list(events)[-1] == {"error": "CANCELLED: Request was cancelled"}


def test_a_request_that_waits_is_cancelled_at_once_and_those_that_run_go_on(
    server: TritonServer, golden: dict[str, list[int]]
) -> None:
    before = finished(server, "continuous", "cancelled")
    with GrpcStream(server) as first, GrpcStream(server) as others, GrpcStream(server) as waiting:
        first.send("continuous", PROMPTS[1], **CAUGHT)
        for number in range(SEATS - 1):
            others.send("continuous", PROMPT, request_id=str(number), stream=False, **LONG)
        wait_for_running(server, "continuous", SEATS)
        waiting.send("continuous", PROMPT, request_id="waiting", stream=False, **LONG)
        wait_for_gauge(server, "continuous", "requests_waiting", 1)
        assert generate(server, "continuous", {"id": "waiting", "cancel": True})[0] == 200
        with pytest.raises(Refused, match="Request was cancelled"):
            waiting.receive()
        assert first.answer().ids[:NUM_GOLDEN] == golden[PROMPTS[1]]
        wait_until_cancelled(server, "continuous", before + 1)
        others.cancel()


@pytest.mark.parametrize("model", STREAMING)
def test_a_client_that_hangs_up_on_generate_stream_ends_the_request(
    server: TritonServer, golden: dict[str, list[int]], model: str
) -> None:
    """CAN-10: fifty of them, eight at a time; the server stays what it was."""

    def hang_up(_: int) -> None:
        connection = http.client.HTTPConnection(server.http_url, timeout=60)
        body = generate_body(model, PROMPT, stream=True, **LONG)
        connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(body))
        answer = connection.getresponse()
        assert next(events_of(answer))["finish_reason"] == ""
        answer.close()
        connection.close()

    with cancelled_once(server, model, golden, count=50), ThreadPoolExecutor(8) as pool:
        list(pool.map(hang_up, range(50)))
    assert TritonHttp(server.http_url).is_model_ready(model)


# A client of one long request, that says when it has three chunks of it, or has sent what gives none.
CLIENT = """
import sys, time
from types import SimpleNamespace
import tritonclient.grpc as triton_grpc
from helpers import GrpcStream, inputs_for, sampling_json

url, way = sys.argv[1:]
endless = {"max_tokens": 2000, "ignore_eos": True}
if way == "plain inference":
    inputs = inputs_for("continuous_unary", "The sky is", sampling_json(**endless))
    client = triton_grpc.InferenceServerClient(url)
    call = client.async_infer("continuous_unary", inputs, lambda result, error: None)
else:
    stream = GrpcStream(SimpleNamespace(grpc_url=url))
    stream.send("continuous", "The sky is", stream=way == "streaming", **endless)
    for _ in range(3 if way == "streaming" else 0):
        stream.receive()
print("ready", flush=True)
time.sleep(600)
"""
# Far from the 400 and 2000 that would be computed otherwise, and from what a busy machine lets the door miss.
FEW_STEPS = 20


@pytest.mark.parametrize("way", ["streaming", "without streaming", "plain inference"])
def test_a_client_whose_connection_breaks_leaves_its_seat_to_the_next_in_the_queue(
    server: TritonServer, golden: dict[str, list[int]], way: str
) -> None:
    """CAN-01, CAN-03: its process is killed, and no seat stays empty for a step."""
    before = finished(server, "continuous", "cancelled")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with others_running(server, SEATS - 1), GrpcStream(server) as waiting:
        with subprocess.Popen(
            [sys.executable, "-c", CLIENT, server.grpc_url, way], env=environment, stdout=subprocess.PIPE, text=True
        ) as client:
            try:
                assert client.stdout is not None
                assert client.stdout.readline() == "ready\n"
                wait_for_running(server, "continuous", SEATS)
                waiting.send("continuous", PROMPTS[1], max_tokens=8)
                wait_until(lambda: occupancy(server) == (SEATS, 1), "the next request waits")
                killed = monotonic()
            finally:
                client.kill()
        waiting.receive()
        records = step_records(server, since=killed)
        assert sum(record["waiting"] for record in records) <= FEW_STEPS
        assert {record["running"] for record in records} == {SEATS}
        assert waiting.answer().ids == golden[PROMPTS[1]][:8]
    assert finished(server, "continuous", "cancelled") == before + SEATS


def assert_every_seat_is_free(server: TritonServer, model: str) -> None:
    """As many requests as there are seats run at the same time."""
    with GrpcStream(server) as stream:
        for number in range(SEATS):
            stream.send(model, PROMPT, request_id=str(number), **LONG)
        wait_for_running(server, model, SEATS)
        stream.cancel()


@pytest.mark.parametrize("model", STREAMING)
def test_more_cancelled_requests_than_there_are_seats_leave_every_seat_free(
    server: TritonServer, golden: dict[str, list[int]], model: str
) -> None:
    """Triton itself would keep the slot of many an iterative sequence that was cancelled."""
    with cancelled_once(server, model, golden, count=40):
        for _ in range(4):
            streams = [GrpcStream(server).send(model, PROMPT, **LONG) for _ in range(10)]
            for stream in streams:
                stream.receive()
                stream.cancel()
    assert_every_seat_is_free(server, model)


@pytest.mark.parametrize("model", STREAMING)
def test_clients_that_cancel_as_soon_as_they_have_the_answer_leave_every_seat_free(
    server: TritonServer, model: str
) -> None:
    def answer_then_cancel(number: int) -> None:
        stream = GrpcStream(server)
        if number % 2:
            stream.send(model, PROMPT, max_tokens=2).collect()
        else:
            with pytest.raises(Refused, match="unknown field 'foo'"):
                stream.send(model, PROMPT, foo=1).receive()
        stream.cancel()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(answer_then_cancel, range(48)))
    assert_every_seat_is_free(server, model)


def test_an_id_can_be_used_again_right_after_it_was_cancelled(
    server: TritonServer, golden: dict[str, list[int]]
) -> None:
    with GrpcStream(server) as old, GrpcStream(server) as new:
        old.send("continuous", PROMPT, request_id="again", **LONG)
        old.receive()
        assert generate(server, "continuous", {"id": "again", "cancel": True})[0] == 200
        new.send("continuous", PROMPTS[1], request_id="again", max_tokens=8)
        assert new.answer().ids == golden[PROMPTS[1]][:8]
        with pytest.raises(Refused, match="Request was cancelled"):
            old.collect()


def test_cancel_names_an_id_that_does_not_run(server: TritonServer) -> None:
    with GrpcStream(server) as stream:
        stream.send("continuous", PROMPT, request_id="done", max_tokens=1).collect()
    for request_id in ("done", "never-sent"):
        status, answer = generate(server, "continuous", {"id": request_id, "cancel": True})
        assert status == 400
        assert answer == {"error": f"INVALID_ARGUMENT: cancel: no running request has the id {request_id!r}"}


def test_leaving_our_iterator_early_cancels_exactly_that_request(
    server: TritonServer, golden: dict[str, list[int]]
) -> None:
    before = finished(server, "continuous", "cancelled")
    with SlipstreamClient(server.grpc_url) as client:
        kept = client.stream(PROMPTS[1], max_tokens=16, temperature=0, return_token_ids=True)
        with client.stream(PROMPT, temperature=0, **LONG) as left:
            assert next(left).num_tokens == 1
        *_, last = kept
    assert last.stats is not None
    assert last.stats["output_ids"] == golden[PROMPTS[1]][:16]
    assert finished(server, "continuous", "cancelled") == before + 1


@pytest.mark.parametrize("model", STREAMING)
def test_a_cancelled_task_of_our_asyncio_client_cancels_its_request(
    server: TritonServer, golden: dict[str, list[int]], model: str
) -> None:
    async def run() -> None:
        async with AsyncSlipstreamClient(server.grpc_url, model) as client:
            task = asyncio.create_task(client.generate(PROMPT, temperature=0, **LONG))
            await asyncio.to_thread(wait_for_running, server, model, 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with cancelled_once(server, model, golden):
        asyncio.run(run())
