"""Servers that start, share, leave and end as they should, with requests in flight."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from helpers import LONG, NUM_GOLDEN, PROMPTS, GrpcStream, Refused, ask
from observing import Metrics, engine_pid, is_alive, occupancy, times_left, wait_until, wait_until_at_rest
from serving import Serving
from slipstream.config import runtime_directory
from slipstream_client import control
from slipstream_client.server.installation import find_tritonserver, lay_out_backends, server_environment
from slipstream_client.server.model_repository import find_repository
from slipstream_client.server.ports import free_ports
from slipstream_client.server.triton_http import TritonHttp, TritonUnreachable
from slipstream_client.server.tritonserver import TritonServer
from spare import AT_ONCE_S, Spare, refusal

pytestmark = pytest.mark.server

SHUTTING_DOWN = "the server is shutting down"
# Of the server that `slipstream serve` runs here.
SEATS = 4
# Tokens of the answers that are under way when it is told to end: long enough for one more request to be refused.
RUNNING = 100
# From the end of tritonserver to that of the stub, which looks once a second, and of the engine after its grace.
ORPHAN_MARGIN_S = 8.0
# For a server without requests to end, on a busy machine.
STOP_S = 12.0


def test_two_servers_share_nothing_and_nothing_outlives_the_one_that_is_killed(
    spare: Spare, start_server: Callable[..., TritonServer], golden: dict[str, list[int]]
) -> None:
    server, grace_s = spare.server, 1
    other = start_server("continuous", SLIPSTREAM_GRACE_SECONDS=str(grace_s))
    assert other.runtime_dir != server.runtime_dir
    assert engine_pid(other, "continuous") != engine_pid(server, "continuous")
    with ThreadPoolExecutor() as pool:
        asked = [
            pool.submit(ask, each, "continuous", p, max_tokens=NUM_GOLDEN) for p in PROMPTS for each in (server, other)
        ]
        assert [answer.result().ids for answer in asked] == [golden[p] for p in PROMPTS for _ in range(2)]
    with GrpcStream(server) as here:
        there = [GrpcStream(other).send("continuous", prompt, **LONG) for prompt in PROMPTS[:4]]
        for stream in there:
            stream.receive()
        here.send("continuous", PROMPTS[0], max_tokens=NUM_GOLDEN)
        engine, processes = engine_pid(other, "continuous"), other.process_ids()
        assert {engine, other.pid} < set(processes)
        assert len(processes) >= 3, "tritonserver, stub and engine"
        os.kill(other.pid, signal.SIGKILL)
        for stream in there:
            with pytest.raises(Refused):
                stream.collect()
        assert here.answer().ids == golden[PROMPTS[0]]
    wait_until(lambda: not other.process_ids(), "no process of the killed server is left", grace_s + ORPHAN_MARGIN_S)
    assert not any(is_alive(pid) for pid in processes)
    assert ask(server, "continuous", PROMPTS[1], max_tokens=NUM_GOLDEN).ids == golden[PROMPTS[1]]


class Served(SimpleNamespace):
    """The addresses of a server that `slipstream serve` or a user started, as the helpers want them."""

    @classmethod
    def by(cls, serving: Serving) -> Served:
        said = serving.ready
        return cls(
            http_url=said["http"],
            grpc_url=said["grpc"],
            metrics_url=said["metrics"].removesuffix("/metrics"),
            runtime_dir=Path(said["runtime_dir"]),
        )


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    """`slipstream serve` with the model `continuous` and few seats."""
    options = ("--models", "continuous", "--drain-seconds", "120")
    running = Serving(tmp_path / "log", *options, SLIPSTREAM_MAX_NUM_SEQS=str(SEATS), SLIPSTREAM_THREADS="1")
    yield running
    running.kill()


def test_serve_replaces_a_killed_stub_and_on_sigterm_lets_finish_what_runs(
    serving: Serving, golden: dict[str, list[int]]
) -> None:
    """ENG-11: four requests run and four wait when it is told to end; every client gets its answer or its error."""
    server = Served.by(serving)
    engine = engine_pid(server, "continuous")
    (stub,) = serving.server.children()
    # One whole answer, so that the stub is not killed in the middle of a response: see the README's flaws of Triton.
    orphan = GrpcStream(server).send("continuous", PROMPTS[0], stream=False, **LONG)
    wait_until(lambda: occupancy(server) == (1, 0), "it runs")
    stub.kill()
    assert [serving.event()["message"] for _ in range(2)] == [
        "continuous: its process ended; loading it again",
        "continuous: ready again",
    ]
    assert ask(server, "continuous", PROMPTS[0], max_tokens=NUM_GOLDEN).ids == golden[PROMPTS[0]]
    status = control.request(server.runtime_dir / "continuous.sock", {"type": "status"})
    assert (status["doors"], status["running"], status["kv_blocks_used"]) == (1, 0, 0)
    assert status["pid"] == engine or not is_alive(engine)
    # Triton itself never ends a stream whose stub was killed; its client has to give up.
    orphan.cancel()

    running = [GrpcStream(server).send("continuous", p, max_tokens=RUNNING, ignore_eos=True) for p in PROMPTS[:SEATS]]
    for stream in running:
        stream.receive()
    waiting = [GrpcStream(server).send("continuous", prompt, max_tokens=8) for prompt in PROMPTS[SEATS:]]
    wait_until(lambda: occupancy(server) == (SEATS, len(waiting)), "all seats are taken and the others wait")
    assert len(serving.processes()) >= 3, "tritonserver, stub and engine"
    serving.process.send_signal(signal.SIGTERM)
    assert serving.event()["event"] == "draining"
    start = time.monotonic()
    for stream in waiting:
        with pytest.raises(Refused) as error:
            stream.collect()
        assert (error.value.text, error.value.code) == (SHUTTING_DOWN, "UNAVAILABLE")
    assert time.monotonic() - start < AT_ONCE_S
    late = refusal(server, "continuous", max_tokens=1)
    assert (late.text, late.code) == (SHUTTING_DOWN, "UNAVAILABLE")
    for prompt, stream in zip(PROMPTS, running, strict=False):
        answer = stream.answer()
        assert (answer.finish_reason, len(answer.ids)) == ("length", RUNNING)
        assert answer.ids[:NUM_GOLDEN] == golden[prompt]
    # The clients' streams are still open, which alone must not keep the server up.
    start = time.monotonic()
    assert serving.event() == {"event": "stopped", "engines": {"continuous": {"finished": SEATS, "aborted": 4}}}
    assert serving.ended() == (0, "")
    assert time.monotonic() - start < STOP_S
    for stream in (*running, *waiting):
        stream.cancel()


def test_plain_tritonserver_without_our_launcher(tmp_path: Path, golden: dict[str, list[int]]) -> None:
    """Two doors find one engine by the server's process alone, and nothing is left when the server has ended.

    ENG-10: an idle server ends at SIGTERM, and both doors have come to the end of their finalize().
    """
    installation = find_tritonserver()
    ports = dict(zip(("http", "grpc", "metrics"), free_ports(3), strict=True))
    needed = ("PATH", "LD_LIBRARY_PATH", "HOME", "TMPDIR", "XDG_CACHE_HOME", "SLIPSTREAM_CACHE")
    environment = server_environment(installation)
    backends = lay_out_backends(installation, tmp_path / "backends")
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                str(installation.binary),
                f"--model-repository={find_repository()}",
                *([f"--backend-directory={backends}"] if backends else []),
                "--model-control-mode=explicit",
                "--load-model=continuous",
                "--load-model=continuous_unary",
                *(f"--{name}-port={port}" for name, port in ports.items()),
            ],
            env={name: environment[name] for name in needed if name in environment} | {"SLIPSTREAM_GRACE_SECONDS": "1"},
            cwd=tmp_path,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        server = Served(
            **{f"{name}_url": f"127.0.0.1:{port}" for name, port in ports.items()},
            runtime_dir=runtime_directory(environment={}, server_pid=process.pid),
            log_path=tmp_path / "log",
        )
        wait_until(lambda: process.poll() is not None or is_ready(server), "the server is ready", seconds=120)
        assert process.poll() is None, (tmp_path / "log").read_text()
        for prompt in PROMPTS[:2]:
            assert ask(server, "continuous", prompt, max_tokens=NUM_GOLDEN).ids == golden[prompt]
            assert ask(server, "continuous_unary", prompt, max_tokens=NUM_GOLDEN).ids == golden[prompt]
        below = psutil.Process(process.pid).children(recursive=True)
        stubs = [each for each in below if each.name().startswith("triton_python")]
        engines = [each for each in below if "slipstream.engine.process" in each.cmdline()]
        assert (len(stubs), len(engines)) == (2, 1)
        assert_either_door_may_leave(server, golden)
        assert engines[0].is_running()
        below += psutil.Process(process.pid).children(recursive=True)
        left = {model: times_left(server, model) for model in ("continuous", "continuous_unary")}
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
        assert {model: times_left(server, model) - before for model, before in left.items()} == dict.fromkeys(left, 1)
        wait_until(lambda: not any(is_alive(each.pid) for each in below), "no process is left", seconds=10)
    finally:
        process.kill()
        process.wait()


def assert_either_door_may_leave(server: Served, golden: dict[str, list[int]]) -> None:
    """What runs for the other door does not notice, and nothing counts twice though the doors take turns to publish."""
    triton, num_tokens = TritonHttp(server.http_url), 120
    counted = Metrics(server).value("generation_tokens_total", "continuous")
    assert counted == 4 * NUM_GOLDEN
    for leaving, staying in (("continuous", "continuous_unary"), ("continuous_unary", "continuous")):
        with ThreadPoolExecutor() as pool:
            running = pool.submit(ask, server, staying, PROMPTS[0], max_tokens=num_tokens, ignore_eos=True)
            wait_until(lambda: occupancy(server) == (1, 0), f"the request of {staying} runs")
            triton.unload(leaving, timeout_s=30)
            wait_until(lambda gone=leaving: triton.model_states()[gone] == "UNAVAILABLE", f"{leaving} is unloaded")
            assert ask(server, staying, PROMPTS[1], max_tokens=4).ids == golden[PROMPTS[1]][:4]
            triton.load(leaving, timeout_s=60)
            assert ask(server, leaving, PROMPTS[2], max_tokens=4).ids == golden[PROMPTS[2]][:4]
            answer = running.result()
        assert len(answer.ids) == num_tokens
        assert answer.ids[:NUM_GOLDEN] == golden[PROMPTS[0]]
        counted += num_tokens + 4 + 4
        wait_until_at_rest(server, ["continuous"])
        assert Metrics(server).value("generation_tokens_total", "continuous") == counted
        assert Metrics(server).value("engine_up", "continuous") == 1


def is_ready(server: Served) -> bool:
    try:
        return TritonHttp(server.http_url).is_ready()
    except TritonUnreachable:
        return False
