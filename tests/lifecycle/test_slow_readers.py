"""Clients that do not read. Triton keeps their answers and tells a door nothing, so what it keeps has a bound."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from helpers import PROMPTS, ask, events_of, generate_body
from observing import engine_status, wait_until
from slipstream_client.client import SlipstreamClient
from spare import SPARE_RESPONSE_BYTES, Spare

pytestmark = pytest.mark.server

# As much as can be asked for of every token.
GREEDY_FOR_MEMORY = {"n": 3, "max_tokens": 2000, "ignore_eos": True, "temperature": 1.0, "logprobs": 20, "seed": 1}
BOUND = f"max_response_bytes allows {SPARE_RESPONSE_BYTES}"


def stuck_over_grpc(spare: Spare) -> Callable[[], tuple[int, str]]:
    """Send a request whose answer is not read; returns what reads it: how many responses, and the error."""
    with SlipstreamClient(spare.server.grpc_url) as client:
        request = client.contract.request("stuck", PROMPTS[0], None, GREEDY_FOR_MEMORY, stream=True)
    # gRPC would enlarge its window and read on by itself.
    channel = grpc.insecure_channel(spare.server.grpc_url, options=[("grpc.http2.bdp_probe", 0)])
    call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([request]))

    def read() -> tuple[int, str]:
        messages = [message.error_message for message in call]
        channel.close()
        return len(messages), messages[-1]

    return read


def stuck_over_http(spare: Spare) -> Callable[[], tuple[int, str]]:
    """The same over server-sent events."""
    connection = http.client.HTTPConnection(spare.server.http_url)
    body: dict[str, Any] = generate_body("continuous", PROMPTS[0], stream=True, **GREEDY_FOR_MEMORY)
    connection.request("POST", "/v2/models/continuous/generate_stream", json.dumps(body | {"return_logprobs": True}))

    def read() -> tuple[int, str]:
        events = list(events_of(connection.getresponse()))
        connection.close()
        return len(events), events[-1]["error"]

    return read


@pytest.mark.parametrize("stick", [stuck_over_grpc, stuck_over_http])
def test_a_client_that_does_not_read_is_ended_at_the_bound_and_costs_the_others_nothing(
    spare: Spare, golden: dict[str, list[int]], stick: Callable[[Spare], Callable[[], tuple[int, str]]]
) -> None:
    read = stick(spare)
    wait_until(lambda: engine_status(spare.server, "continuous")["running"] == 3, "it runs")
    assert ask(spare.server, "continuous", PROMPTS[1], max_tokens=16).ids == golden[PROMPTS[1]]
    wait_until(lambda: engine_status(spare.server, "continuous")["running"] == 0, "it is ended", seconds=120)
    assert engine_status(spare.server, "continuous")["kv_blocks_used"] == 0
    assert ask(spare.server, "continuous", PROMPTS[2], max_tokens=16).ids == golden[PROMPTS[2]]
    # Nothing of what it was sent is lost.
    num_responses, error = read()
    assert error.startswith("INVALID_ARGUMENT: the answer takes")
    assert BOUND in error
    assert num_responses > 100


def test_one_response_that_is_too_long_for_the_bound_is_still_an_answer(spare: Spare) -> None:
    """The bound is for what piles up: a whole answer is one response, whose size its own fields bound."""
    with SlipstreamClient(spare.server.grpc_url) as client:
        answer = client.generate(PROMPTS[0], **(GREEDY_FOR_MEMORY | {"max_tokens": 400}))  # type: ignore[arg-type]
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 400
