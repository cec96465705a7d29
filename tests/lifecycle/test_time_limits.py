"""What the longest time of a request is for: clients that leave unseen, and a server that nobody has drained."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from helpers import PROMPTS, Answer, Refused, ask, generate_body
from observing import Metrics, occupancy, step_records, times_left, wait_until, wait_until_at_rest
from slipstream_client.server.tritonserver import TritonServer

pytestmark = pytest.mark.server

SEATS = 2
LONGEST_S = 4
# From sending to the door's clock, on a busy machine.
ARRIVAL_S = 2.0
ENDLESS = {"max_tokens": 4000, "ignore_eos": True}
# Triton's own, which the launcher sets; the server exits with another code when it is over.
EXIT_TIMEOUT_S = 8


def test_the_longest_time_ends_what_no_client_waits_for_and_what_runs_when_the_server_is_told_to_end(
    start_server: Callable[..., TritonServer],
) -> None:
    server = start_server(
        "continuous",
        SLIPSTREAM_MAX_REQUEST_SECONDS=str(LONGEST_S),
        SLIPSTREAM_MAX_NUM_SEQS=str(SEATS),
        SLIPSTREAM_GRACE_SECONDS="1",
    )
    a_client_that_hangs_up_on_generate_is_noticed_by_nobody(server)
    sigterm_with_requests_in_flight(server)


def a_client_that_hangs_up_on_generate_is_noticed_by_nobody(server: TritonServer) -> None:
    """CAN-03: over HTTP, where Triton writes only at the end and so never tells."""
    sent = time.monotonic()
    with contextlib.closing(http.client.HTTPConnection(server.http_url, timeout=30)) as connection:
        body = generate_body("continuous", PROMPTS[0], **ENDLESS)
        connection.request("POST", "/v2/models/continuous/generate", json.dumps(body))
        wait_until(lambda: occupancy(server) == (1, 0), "it runs")
    wait_until(lambda: occupancy(server) == (0, 0), "its time is up")
    wait_until_at_rest(server, ["continuous"])
    *computing, last = step_records(server, since=sent)
    assert computing[-1]["start_s"] - sent < LONGEST_S + ARRIVAL_S
    assert last["start_s"] - sent > LONGEST_S
    assert (last["running"], last["kv_blocks_used"]) == (0, 0)
    assert Metrics(server).finished("continuous", "timeout") == 1


def sigterm_with_requests_in_flight(server: TritonServer) -> None:
    """ENG-10, ENG-11: to tritonserver itself, without a drain; every client returns, and the server ends in order."""
    with ThreadPoolExecutor(2 * SEATS) as pool:
        running = [pool.submit(ask, server, "continuous", prompt, **ENDLESS) for prompt in PROMPTS[:SEATS]]
        wait_until(lambda: occupancy(server) == (SEATS, 0), "all seats are taken")
        waiting = [pool.submit(ask, server, "continuous", prompt, **ENDLESS) for prompt in PROMPTS[:SEATS]]
        wait_until(lambda: occupancy(server) == (SEATS, SEATS), "as many wait")
        told_at = time.monotonic()
        os.kill(server.pid, signal.SIGTERM)
        for request in running:
            answer = request.result(timeout=30)
            assert answer.finish_reason == "timeout"
            assert answer.num_output_tokens == len(answer.ids) > 0
        for request in waiting:
            assert timed_out(request)
    wait_until(lambda: not server.running, "the server has ended", 30)
    assert server._process is not None
    assert server._process.ending == "exit code 0", server.log_path.read_text()
    assert time.monotonic() - told_at < EXIT_TIMEOUT_S + 2
    assert times_left(server, "continuous") == 1
    wait_until(lambda: not server.process_ids(), "the engine has followed it", 30)


def timed_out(request: Future[Answer]) -> bool:
    """Whether its time was up: in the queue, or in the seat of one whose time was up a moment before."""
    try:
        return request.result(timeout=30).finish_reason == "timeout"
    except Refused as refused:
        return refused.text.startswith("deadline: still in the queue")
