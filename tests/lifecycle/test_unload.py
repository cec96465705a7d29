"""Unloading and loading models through the repository API while they have requests in flight."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers import (
    LONG,
    NUM_GOLDEN,
    PROMPTS,
    STREAMING,
    Answer,
    GrpcStream,
    Refused,
    ask,
    events_of,
    generate,
    generate_body,
)
from observing import Metrics, engine_pid, is_alive, occupancy, times_left, wait_until
from slipstream_client.admin import AdminClient
from slipstream_client.aio import AsyncSlipstreamClient
from slipstream_client.client import SlipstreamClient
from slipstream_client.server.triton_http import TritonHttp
from slipstream_client.server.tritonserver import TritonServer
from slipstream_client.tensors import RequestFailed
from spare import SPARE_SEATS, Spare

pytestmark = pytest.mark.server

# It takes little more than a second; the rest is for a busy machine.
UNLOAD_S = 30.0


def test_requests_in_flight_finish_and_the_models_can_be_loaded_again(
    spare: Spare, golden: dict[str, list[int]]
) -> None:
    """Those that run and, in the continuous engine, those that wait for a seat: all get their whole answers."""
    server, triton = spare.server, TritonHttp(spare.server.http_url)
    use_our_clients(server)
    num_requests = {"continuous": SPARE_SEATS + 2, "dynamic": 2, "iterative": 2}
    engines = {model: engine_pid(server, model) for model in num_requests}
    streams: dict[str, GrpcStream] = {}
    for model, number in num_requests.items():
        streams[model] = GrpcStream(server)
        for index in range(number):
            sampling = {"max_tokens": 40, "ignore_eos": True}
            streams[model].send(model, PROMPTS[index], request_id=str(index), stream=False, **sampling)
    wait_until(lambda: occupancy(server) == (SPARE_SEATS, 2), "all seats are taken and two requests wait")
    for model in ("dynamic", "iterative"):
        wait_until(lambda model=model: occupancy(server, model) == (2, 0), f"both requests of {model} run")
    for model in num_requests:
        triton.unload(model, timeout_s=30)
    for model, number in num_requests.items():
        answers = answers_by_id(streams[model], number)
        streams[model].close()
        for index, prompt in enumerate(PROMPTS[:number]):
            answer = answers[str(index)]
            assert (answer.finish_reason, len(answer.ids)) == ("length", 40)
            assert answer.ids[:NUM_GOLDEN] == golden[prompt]
    for model, engine in engines.items():
        wait_until(lambda model=model: triton.model_states()[model] == "UNAVAILABLE", f"{model} is unloaded")
        with pytest.raises(Refused, match=f"Request for unknown model: '{model}' has no available versions"):
            ask(server, model, PROMPTS[0], max_tokens=1)
        wait_until(lambda engine=engine: not is_alive(engine), "the engine has ended after its grace of a second", 6)
        assert not (server.runtime_dir / f"{model}.zmq").exists()
        assert Metrics(server).samples("slipstream_engine_up", model=model) in ([], [0.0])

    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda model: triton.load(model, timeout_s=120), engines))
    for model, engine in engines.items():
        assert ask(server, model, PROMPTS[0], max_tokens=NUM_GOLDEN).ids == golden[PROMPTS[0]]
        assert engine_pid(server, model) != engine


def answers_by_id(stream: GrpcStream, number: int) -> dict[str, Answer]:
    """The answers to all requests of a stream, each joined from its responses."""
    responses: dict[str, list] = {}
    while number:
        response = stream.receive()
        responses.setdefault(response.request_id, []).append(response.outputs)
        number -= response.final
    return {request_id: Answer.of(outputs) for request_id, outputs in responses.items()}


def use_our_clients(server: TritonServer) -> None:
    """Whatever they ask, and however soon they leave, Triton must not be left waiting for a request of theirs."""

    async def ask_and_be_refused(client: AsyncSlipstreamClient) -> None:
        for _ in range(4):
            await client.generate(PROMPTS[0], max_tokens=1)
            with pytest.raises(RequestFailed, match="temperature"):
                await client.generate(PROMPTS[0], temperature=-1.0)

    async def use_asyncio_client() -> None:
        async with AsyncSlipstreamClient(server.grpc_url) as client:
            await asyncio.gather(*(ask_and_be_refused(client) for _ in range(4)))

    asyncio.run(use_asyncio_client())
    for model in ("continuous", "iterative") * 4:
        with SlipstreamClient(server.grpc_url, model) as client:
            assert client.generate(PROMPTS[0], max_tokens=1).num_output_tokens == 1


def finish(server: TritonServer, model: str) -> None:
    ask(server, model, PROMPTS[0], max_tokens=4)


def fail(server: TritonServer, model: str) -> None:
    for _ in range(3):
        with pytest.raises(Refused, match="unknown field 'foo'"):
            ask(server, model, PROMPTS[0], foo=1)


def cancel_the_stream(server: TritonServer, model: str) -> None:
    """With more requests on it than there are seats: some run, others wait."""
    stream = GrpcStream(server)
    for index in range(SPARE_SEATS + 2):
        stream.send(model, PROMPTS[index], request_id=str(index), **LONG)
    for _ in range(SPARE_SEATS):
        stream.receive()
    stream.cancel()


def cancel_by_request(server: TritonServer, model: str) -> None:
    with GrpcStream(server) as stream:
        stream.send(model, PROMPTS[0], request_id="unwanted", **LONG).receive()
        assert generate(server, model, {"id": "unwanted", "cancel": True})[0] == 200
        with pytest.raises(Refused, match="Request was cancelled"):
            stream.collect()


def hang_up(server: TritonServer, model: str) -> None:
    with contextlib.closing(http.client.HTTPConnection(server.http_url, timeout=60)) as connection:
        body = generate_body(model, PROMPTS[0], stream=True, **LONG)
        connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(body))
        answer = connection.getresponse()
        next(events_of(answer))
        answer.close()


def lose_the_engine(server: TritonServer, model: str) -> None:
    with GrpcStream(server) as stream:
        stream.send(model, PROMPTS[0], **LONG).receive()
        os.kill(engine_pid(server, model), signal.SIGKILL)
        with pytest.raises(Refused, match="died and is being started again"):
            stream.collect()


STREAM_ENDS = (finish, fail, cancel_the_stream, hang_up)


@pytest.mark.parametrize("model", STREAMING)
def test_a_model_whose_streams_finished_failed_and_were_cancelled_is_unloaded_in_order_and_loaded_again(
    spare: Spare, golden: dict[str, list[int]], model: str
) -> None:
    """ENG-09. Only for a stream that is cancelled right behind a last response Triton waits for ever (README)."""
    for end in (*STREAM_ENDS, *([cancel_by_request] if model == "continuous" else [])):
        end(spare.server, model)
        wait_until(lambda: occupancy(spare.server, model) == (0, 0), "nothing runs any more")
    assert_unloads_and_loads(spare.server, golden, model)


@pytest.mark.parametrize("model", STREAMING)
def test_a_model_whose_engine_has_died_under_a_stream_is_unloaded_in_order_and_loaded_again(
    spare: Spare, golden: dict[str, list[int]], model: str
) -> None:
    """ENG-09: also before the next engine is there."""
    lose_the_engine(spare.server, model)
    assert_unloads_and_loads(spare.server, golden, model)


def test_admin_tells_nothing_unless_it_is_enabled(spare: Spare) -> None:
    triton = TritonHttp(spare.server.http_url)
    with AdminClient(spare.server.grpc_url) as admin:
        triton.load("admin", timeout_s=60)
        try:
            with pytest.raises(RequestFailed, match="the admin model is off; SLIPSTREAM_ADMIN=true turns it on") as off:
                admin.status("continuous")
        finally:
            triton.unload("admin", timeout_s=30)
    assert off.value.code == "UNAVAILABLE"


def assert_unloads_and_loads(server: TritonServer, golden: dict[str, list[int]], model: str) -> None:
    triton, before = TritonHttp(server.http_url), times_left(server, model)
    triton.unload(model, timeout_s=UNLOAD_S)
    wait_until(lambda: triton.model_states()[model] == "UNAVAILABLE", f"{model} is unloaded", UNLOAD_S)
    wait_until(lambda: times_left(server, model) == before + 1, "finalize() has come to its end", UNLOAD_S)
    triton.load(model, timeout_s=120)
    assert ask(server, model, PROMPTS[0], max_tokens=4).ids == golden[PROMPTS[0]][:4]
