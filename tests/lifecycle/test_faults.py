"""What dies, and what is too much: whoever waits is told at once, and what is left works as before."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from helpers import LONG, PROMPTS, Answer, GrpcStream, Refused, ask, events_of, generate_body
from observing import Metrics, engine_pid, wait_for_gauge, wait_for_running, wait_until, wait_until_at_rest
from slipstream_client.client import SlipstreamClient
from slipstream_client.tensors import RequestFailed, parse_rows
from spare import SPARE_QUEUE, SPARE_SEATS, Spare, refusal, refused_at_once

pytestmark = pytest.mark.server

# For the backoff, and for a machine that is busier now than it was at the first start.
RECOVERY_MARGIN_S = 5.0
NUM_TOKENS = 12


def greedy(spare: Spare, model: str) -> list[list[int]]:
    """The ids that the model answers a few prompts with."""
    return [ask(spare.server, model, prompt, max_tokens=NUM_TOKENS).ids for prompt in PROMPTS[:3]]


def kill_engine(spare: Spare, engine: str) -> float:
    """Kill the engine as nothing can catch it; the time of the deed."""
    os.kill(engine_pid(spare.server, engine), signal.SIGKILL)
    return time.monotonic()


def wait_until_back(spare: Spare, engine: str, killed_at: float) -> None:
    """Wait until the engine's gauge says that it is up again, which takes about as long as the first start."""
    allowed_s = 2 * spare.first_start_s + RECOVERY_MARGIN_S
    wait_for_gauge(spare.server, engine, "engine_up", 1, allowed_s - (time.monotonic() - killed_at))


def assert_down_and_idle(spare: Spare, engine: str) -> None:
    """The gauges say that the engine is down, and that nothing runs, waits or holds blocks."""
    wait_for_gauge(spare.server, engine, "engine_up", 0, seconds=5)
    metrics = Metrics(spare.server)
    assert metrics.samples("slipstream_engine_up", model=engine) == [0.0]
    assert metrics.at_rest(engine)
    assert metrics.value("kv_blocks_total", engine) > 0


def test_continuous_engine_killed_while_it_answers_and_again_while_it_loads(spare: Spare) -> None:
    server, before = spare.server, greedy(spare, "continuous")
    counted = Metrics(server).value("generation_tokens_total", "continuous")
    with ThreadPoolExecutor() as pool, GrpcStream(server) as stream:
        stream.send("continuous", PROMPTS[0], **LONG)
        other = pool.submit(refusal, server, "continuous", PROMPTS[1], **LONG)
        wait_for_running(server, "continuous", 2)
        stream.receive()
        old_pid = engine_pid(server, "continuous")
        killed_at = kill_engine(spare, "continuous")
        died = "engine 'continuous' died and is being started again"
        with pytest.raises(Refused) as error:
            stream.collect()
        assert error.value.text == died
        assert (other.result(timeout=5).text, other.result().code) == (died, "UNAVAILABLE")
        assert time.monotonic() - killed_at < 5
    assert refused_at_once(server, "continuous") == (f"the engine is not up: {died}", "UNAVAILABLE")
    assert_down_and_idle(spare, "continuous")
    # The others are engines of their own.
    assert Metrics(server).value("engine_up", "dynamic") == 1
    assert ask(server, "dynamic", PROMPTS[0], max_tokens=NUM_TOKENS).ids == before[0]

    second = wait_until(lambda: pid_of_another_engine(spare, "continuous", old_pid), "another engine has been started")
    os.kill(second, signal.SIGKILL)
    wait_until(lambda: pid_of_another_engine(spare, "continuous", old_pid, second), "a third engine has been started")
    wait_until_back(spare, "continuous", killed_at)
    assert greedy(spare, "continuous") == before
    # Counters never fall, though the new engine counts from nothing.
    assert Metrics(server).value("generation_tokens_total", "continuous") >= counted + 3 * NUM_TOKENS


def test_an_error_after_streamed_tokens_leaves_the_text_so_far_and_ends_the_request(spare: Spare) -> None:
    """TRI-07: over a bare gRPC stream, server-sent events and our client, whose engine dies after three chunks."""
    server = spare.server
    whole = ask(server, "continuous", PROMPTS[0], max_tokens=40, ignore_eos=True).text
    with SlipstreamClient(server.grpc_url) as client, grpc.insecure_channel(server.grpc_url) as channel:
        bare = client.contract.request("bare", PROMPTS[0], None, {"temperature": 0, **LONG}, stream=True)
        messages = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([bare]))
        ours = client.stream(PROMPTS[0], temperature=0, **LONG)
        with sse_stream(server.http_url, generate_body("continuous", PROMPTS[0], stream=True, **LONG)) as events:
            streamed: dict[str, list[Any]] = {
                "bare": [next(messages).infer_response for _ in range(3)],
                "ours": [next(ours) for _ in range(3)],
                "sse": [next(events) for _ in range(3)],
            }
            killed_at = kill_engine(spare, "continuous")
            died = "engine 'continuous' died and is being started again"

            # Read to its end, which comes because the request has ended.
            *more, last = messages
            assert [message.error_message for message in more] == [""] * len(more)
            assert last.error_message == f"UNAVAILABLE: {died}"
            assert {message.infer_response.id for message in (*more, last)} == {"bare"}
            streamed["bare"] += [message.infer_response for message in more]

            *more_events, last_event = events
            assert last_event == {"error": f"UNAVAILABLE: {died}"}
            streamed["sse"] += more_events

            with pytest.raises(RequestFailed) as error:
                streamed["ours"].extend(ours)
            assert (error.value.text, error.value.code) == (died, "UNAVAILABLE")
    texts = {
        "bare": "".join(parse_rows(response)[0].text for response in streamed["bare"]),
        "ours": "".join(chunk.text for chunk in streamed["ours"]),
        "sse": "".join(event["text_output"] for event in streamed["sse"]),
    }
    for text in texts.values():
        length = min(len(text), len(whole))
        assert length > 0
        assert text[:length] == whole[:length]
    wait_until_back(spare, "continuous", killed_at)


@contextlib.contextmanager
def sse_stream(url: str, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of a request over HTTP as they come."""
    with contextlib.closing(http.client.HTTPConnection(url, timeout=60)) as connection:
        connection.request("POST", "/v2/models/continuous/generate_stream", json.dumps(body))
        yield events_of(connection.getresponse())


def pid_of_another_engine(spare: Spare, engine: str, *others: int) -> int | None:
    try:
        pid = engine_pid(spare.server, engine)
    except Exception:
        return None
    return None if pid in others else pid


def test_dynamic_engine_killed_while_execute_holds(spare: Spare) -> None:
    """Both the batch that is computed and the requests in Triton's queue behind it get an error."""
    server, before = spare.server, greedy(spare, "dynamic")
    with ThreadPoolExecutor() as pool:
        waiting: list[Future[Answer]] = [pool.submit(ask, server, "dynamic", PROMPTS[0], **LONG)]
        wait_for_running(server, "dynamic", 1)
        waiting += [pool.submit(ask, server, "dynamic", PROMPTS[1], **LONG) for _ in range(2)]
        wait_until(
            lambda: Metrics(server).samples("nv_inference_pending_request_count", model="dynamic") == [2.0],
            "two requests wait in Triton's queue",
        )
        killed_at = kill_engine(spare, "dynamic")
        errors = [request.exception(timeout=5) for request in waiting]
    died = "engine 'dynamic' died and is being started again"
    assert [(error.text, error.code) for error in errors if isinstance(error, Refused)] == [
        (died, "UNAVAILABLE"),
        *[(f"the engine is not up: {died}", "UNAVAILABLE")] * 2,
    ]
    assert_down_and_idle(spare, "dynamic")
    wait_until_back(spare, "dynamic", killed_at)
    assert greedy(spare, "dynamic") == before


def test_iterative_engine_killed_between_two_tokens(spare: Spare) -> None:
    """Every sequence ends with an error, and none keeps its slot in Triton."""
    server, before = spare.server, greedy(spare, "iterative")
    streams = [GrpcStream(server).send("iterative", prompt, **LONG) for prompt in PROMPTS[:SPARE_SEATS]]
    for stream in streams:
        stream.receive()
    killed_at = kill_engine(spare, "iterative")
    died = "engine 'iterative' died and is being started again"
    for stream in streams:
        with pytest.raises(Refused) as error:
            stream.collect()
        assert error.value.text in (died, f"the engine is not up: {died}")
        stream.close()
    assert time.monotonic() - killed_at < 5
    assert refused_at_once(server, "iterative") == (f"the engine is not up: {died}", "UNAVAILABLE")
    assert_down_and_idle(spare, "iterative")
    wait_until_back(spare, "iterative", killed_at)
    assert greedy(spare, "iterative") == before


def test_a_burst_beyond_the_queue_is_refused_and_the_accepted_requests_finish(spare: Spare) -> None:
    server, count = spare.server, 100
    expected = ask(server, "continuous", PROMPTS[0], max_tokens=NUM_TOKENS).ids
    with GrpcStream(server) as running, GrpcStream(server) as burst:
        for number in range(SPARE_SEATS):
            running.send("continuous", PROMPTS[1], request_id=str(number), stream=False, max_tokens=64, ignore_eos=True)
        wait_for_running(server, "continuous", SPARE_SEATS)
        for _ in range(count):
            burst.send("continuous", PROMPTS[0], stream=False, max_tokens=NUM_TOKENS)
        answers, refusals = [], []
        for _ in range(count):
            try:
                answers.append(burst.receive())
            except Refused as refused:
                refusals.append(refused.text)
        assert sorted(running.receive().request_id for _ in range(SPARE_SEATS)) == ["0", "1", "2", "3"]
    assert len(refusals) >= count - SPARE_QUEUE - SPARE_SEATS
    full = f"the queue is full: {SPARE_QUEUE} requests wait, max_queued_requests allows no more"
    assert set(refusals) == {full}
    assert len(answers) >= SPARE_QUEUE
    assert {tuple(Answer.of([answer.outputs]).ids) for answer in answers} == {tuple(expected)}
    wait_until_at_rest(server, ["continuous"])
