"""Draining one engine over its control socket, as `slipstream serve` does with all of them before it ends."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers import LONG, PROMPTS, Refused, Spare, ask, engine_pid, wait_for_gauge, wait_until
from slipstream_client import control
from slipstream_client.server.tritonserver import TritonServer

pytestmark = pytest.mark.server


@pytest.mark.parametrize("model", ["continuous", "dynamic", "iterative"])
def test_what_does_not_end_in_time_is_told_so_and_what_comes_later_is_refused(
    spare: Spare, golden: dict[str, list[int]], model: str
) -> None:
    """Between two calls of Triton an iterative sequence is in nobody's hands: its end must not be lost there."""
    server = spare.server
    try:
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(ask, server, model, prompt, **LONG) for prompt in PROMPTS[:2]]
            wait_for_gauge(server, model, "requests_running", 2)
            message = {"type": "drain", "timeout_s": 0.2}
            drained = control.request(server.runtime_dir / f"{model}.sock", message, timeout_s=30)
            assert drained == {"type": "drained", "finished": 0, "aborted": 2}
            for request in running:
                with pytest.raises(Refused) as error:
                    request.result(timeout=10)
                assert error.value.text == "the server is shutting down and the request did not end in time"
        with pytest.raises(Refused) as error:
            ask(server, model, PROMPTS[0], max_tokens=1)
        assert error.value.text == "the server is shutting down"
    finally:
        # A drained engine stays so; the one that follows it does not.
        os.kill(engine_pid(server, model), signal.SIGKILL)
        wait_until(lambda: answers_with(server, model, golden[PROMPTS[0]][:4]), "the next engine answers", 60)


def answers_with(server: TritonServer, model: str, ids: list[int]) -> bool:
    try:
        return ask(server, model, PROMPTS[0], max_tokens=len(ids)).ids == ids
    except Refused:
        return False
