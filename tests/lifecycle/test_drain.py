"""Draining the engines over their control sockets, as `slipstream serve` does before it ends."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers import LONG, PROMPTS, Refused, ask
from observing import engine_pid, wait_for_running, wait_until
from slipstream_client.server.tritonserver import TritonServer
from spare import Spare

pytestmark = pytest.mark.server

MODELS = ("continuous", "dynamic", "iterative")


def test_what_does_not_end_in_time_is_told_so_and_what_comes_later_is_refused(
    spare: Spare, golden: dict[str, list[int]]
) -> None:
    """Between two calls of Triton an iterative sequence is in nobody's hands: its end must not be lost there."""
    server = spare.server
    try:
        with ThreadPoolExecutor() as pool:
            running = [pool.submit(ask, server, model, prompt, **LONG) for model in MODELS for prompt in PROMPTS[:2]]
            for model in MODELS:
                wait_for_running(server, model, 2)
            drained = {"type": "drained", "finished": 0, "aborted": 2}
            assert server.drain(seconds=0.2) == dict.fromkeys(MODELS, drained)
            for request in running:
                with pytest.raises(Refused) as error:
                    request.result(timeout=10)
                assert error.value.text == "the server is shutting down and the request did not end in time"
        for model in MODELS:
            with pytest.raises(Refused) as error:
                ask(server, model, PROMPTS[0], max_tokens=1)
            assert error.value.text == "the server is shutting down"
    finally:
        # A drained engine stays so; the one that follows it does not.
        for model in MODELS:
            os.kill(engine_pid(server, model), signal.SIGKILL)
        for model in MODELS:
            wait_until(lambda model=model: answers(server, model, golden), f"the next {model} engine answers", 60)


def answers(server: TritonServer, model: str, golden: dict[str, list[int]]) -> bool:
    try:
        return ask(server, model, PROMPTS[0], max_tokens=4).ids == golden[PROMPTS[0]][:4]
    except Refused:
        return False
