"""Unloading a model through the repository API while it has requests in flight."""

from __future__ import annotations

import pytest

from helpers import (
    PROMPTS,
    GrpcStream,
    Refused,
    Spare,
    ask,
    engine_pid,
    inputs_for,
    is_alive,
    post,
    sampling_json,
    wait_for_gauge,
    wait_until,
)
from slipstream_client.server.triton_http import TritonHttp
from slipstream_client.server.tritonserver import TritonServer

pytestmark = pytest.mark.server


def unload(server: TritonServer, model: str) -> None:
    status, text = post(server, f"repository/models/{model}/unload")
    assert status == 200, text


def load(server: TritonServer, model: str) -> None:
    status, text = post(server, f"repository/models/{model}/load", timeout_s=120)
    assert status == 200, text


def wait_until_unloaded(server: TritonServer, model: str) -> None:
    http = TritonHttp(server.http_url)
    wait_until(lambda: http.model_states()[model] == "UNAVAILABLE", f"{model} is unloaded")


@pytest.mark.parametrize("model", ["dynamic", "iterative"])
def test_requests_in_flight_finish_and_the_model_can_be_loaded_again(
    spare: Spare, golden: dict[str, list[int]], model: str
) -> None:
    server = spare.server
    pid = engine_pid(server, model)
    with GrpcStream(server) as first, GrpcStream(server) as second:
        streams = {PROMPTS[0]: first, PROMPTS[1]: second}
        for prompt, stream in streams.items():
            stream.send(model, inputs=inputs_for(model, prompt, sampling_json(max_tokens=16)))
        wait_for_gauge(server, model, "requests_running", 2)
        unload(server, model)
        for prompt, stream in streams.items():
            assert stream.answer().ids == golden[prompt]
    wait_until_unloaded(server, model)
    with pytest.raises(Refused, match="has no available versions"):
        ask(server, model, PROMPTS[0], max_tokens=1)
    wait_until(lambda: not is_alive(pid), "its engine ends after its last door")
    load(server, model)
    assert engine_pid(server, model) != pid
    assert ask(server, model, PROMPTS[0], max_tokens=8).ids == golden[PROMPTS[0]][:8]


def test_a_model_whose_engine_has_another_door_comes_and_goes_without_it(
    server: TritonServer, golden: dict[str, list[int]]
) -> None:
    """The engine, and what runs on it for the other model, does not notice."""
    pid = engine_pid(server, "continuous")
    with GrpcStream(server) as stream:
        stream.send("continuous", PROMPTS[0], max_tokens=200, ignore_eos=True)
        responses = [stream.receive()]
        unload(server, "continuous_unary")
        wait_until_unloaded(server, "continuous_unary")
        load(server, "continuous_unary")
        assert ask(server, "continuous_unary", PROMPTS[1], max_tokens=4).ids == golden[PROMPTS[1]][:4]
        responses += stream.collect()
    assert sum(response.outputs["num_output_tokens"][0] for response in responses) == 200
    assert engine_pid(server, "continuous") == pid
