"""Servers and models that start, share, leave and end as they should, with requests in flight."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from fault_helpers import AT_ONCE_S
from helpers import (
    LONG,
    NUM_GOLDEN,
    PROMPTS,
    SPARE_SEATS,
    Answer,
    GrpcStream,
    Metrics,
    Refused,
    Spare,
    ask,
    engine_pid,
    is_alive,
    wait_until,
    wait_until_at_rest,
)
from serving import Serving
from slipstream_client import control
from slipstream_client.server.installation import find_tritonserver, lay_out_backends, server_environment
from slipstream_client.server.model_repository import find_repository
from slipstream_client.server.ports import free_ports
from slipstream_client.server.triton_http import TritonHttp, TritonUnreachable
from slipstream_client.server.tritonserver import TritonServer

pytestmark = pytest.mark.server

SHUTTING_DOWN = "the server is shutting down"
# Of the servers that `slipstream serve` runs here.
SEATS = 4
# For a server without requests to end, on a busy machine.
STOP_S = 12.0


def test_two_servers_share_nothing_and_answer_the_same(
    server: TritonServer, start_server: Callable[..., TritonServer], golden: dict[str, list[int]]
) -> None:
    other = start_server("continuous")
    assert other.runtime_dir != server.runtime_dir
    assert engine_pid(other, "continuous") != engine_pid(server, "continuous")
    with ThreadPoolExecutor() as pool:
        asked = [
            pool.submit(ask, each, "continuous", p, max_tokens=NUM_GOLDEN) for p in PROMPTS for each in (server, other)
        ]
        assert [answer.result().ids for answer in asked] == [golden[p] for p in PROMPTS for _ in range(2)]
    with ThreadPoolExecutor() as pool, GrpcStream(server) as here, GrpcStream(other) as there:
        here.send("continuous", PROMPTS[0], max_tokens=NUM_GOLDEN)
        there.send("continuous", PROMPTS[0], **LONG)
        there.receive()
        processes = other.process_ids()
        stopped = pool.submit(other.stop, drain_seconds=1)
        with pytest.raises(Refused) as error:
            there.collect()
        there.cancel()
        stopped.result(timeout=60)
        assert error.value.text == f"{SHUTTING_DOWN} and the request did not end in time"
        assert here.answer().ids == golden[PROMPTS[0]]
    assert not any(is_alive(pid) for pid in processes)
    assert not other.runtime_dir.exists()
    assert ask(server, "continuous", PROMPTS[1], max_tokens=NUM_GOLDEN).ids == golden[PROMPTS[1]]


def test_unloading_a_model_lets_its_requests_finish_and_loading_brings_it_back(
    spare: Spare, golden: dict[str, list[int]]
) -> None:
    """Those that run and those that wait for a seat all get their whole answers."""
    server, triton = spare.server, TritonHttp(spare.server.http_url)
    engine, num_requests = engine_pid(server, "continuous"), SPARE_SEATS + 2
    sampling = {"max_tokens": 128, "ignore_eos": True}
    with GrpcStream(server) as stream:
        for number in range(num_requests):
            if number == SPARE_SEATS:
                wait_until(lambda: gauges(server) == (SPARE_SEATS, 0), "all seats are taken")
            stream.send("continuous", PROMPTS[number], request_id=str(number), stream=False, **sampling)
        wait_until(lambda: gauges(server) == (SPARE_SEATS, 2), "all seats are taken and two requests wait")
        triton.unload("continuous", timeout_s=30)
        responses = {response.request_id: response for response in (stream.receive() for _ in range(num_requests))}
    for number, prompt in enumerate(PROMPTS[:num_requests]):
        answer = Answer.of([responses[str(number)].outputs])
        assert (answer.finish_reason, len(answer.ids)) == ("length", 128)
        assert answer.ids[:NUM_GOLDEN] == golden[prompt]
    wait_until(lambda: triton.model_states()["continuous"] == "UNAVAILABLE", "the model is unloaded")
    with pytest.raises(Refused, match="Request for unknown model: 'continuous' has no available versions"):
        ask(server, "continuous", PROMPTS[0], max_tokens=1)
    wait_until(lambda: not is_alive(engine), "the engine has ended after its grace of a second", seconds=6)
    assert not (server.runtime_dir / "continuous.zmq").exists()
    assert Metrics(server).samples("slipstream_engine_up", model="continuous") in ([], [0.0])

    triton.load("continuous", timeout_s=120)
    assert ask(server, "continuous", PROMPTS[0], max_tokens=NUM_GOLDEN).ids == golden[PROMPTS[0]]
    assert engine_pid(server, "continuous") != engine


def gauges(server: TritonServer | Served) -> tuple[float, float]:
    """How many requests run and how many wait in the continuous engine, at one moment."""
    metrics = Metrics(server)
    return metrics.value("requests_running", "continuous"), metrics.value("requests_waiting", "continuous")


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
    running = Serving(
        tmp_path / "log", "--models", "continuous", SLIPSTREAM_MAX_NUM_SEQS=str(SEATS), SLIPSTREAM_THREADS="1"
    )
    yield running
    running.kill()


def test_sigterm_refuses_what_waits_lets_finish_what_runs_and_exits_with_0(
    serving: Serving, golden: dict[str, list[int]]
) -> None:
    server = Served.by(serving)
    running = [GrpcStream(server).send("continuous", p, max_tokens=64, ignore_eos=True) for p in PROMPTS[:SEATS]]
    for stream in running:
        stream.receive()
    waiting = [GrpcStream(server).send("continuous", prompt, max_tokens=8) for prompt in PROMPTS[SEATS:]]
    wait_until(lambda: gauges(server) == (SEATS, len(waiting)), "all seats are taken and the others wait")
    assert len(serving.processes()) >= 3, "tritonserver, stub and engine"
    serving.process.send_signal(signal.SIGTERM)
    assert serving.event()["event"] == "draining"
    start = time.monotonic()
    for stream in waiting:
        with pytest.raises(Refused) as error:
            stream.collect()
        assert error.value.text == SHUTTING_DOWN
    assert time.monotonic() - start < AT_ONCE_S
    for prompt, stream in zip(PROMPTS, running, strict=False):
        answer = stream.answer()
        assert (answer.finish_reason, len(answer.ids)) == ("length", 64)
        assert answer.ids[:NUM_GOLDEN] == golden[prompt]
    # The clients' streams are still open, which alone must not keep the server up.
    start = time.monotonic()
    assert serving.event() == {"event": "stopped", "engines": {"continuous": {"finished": SEATS, "aborted": 4}}}
    assert serving.ended() == (0, "")
    assert time.monotonic() - start < STOP_S
    for stream in (*running, *waiting):
        stream.cancel()


def test_a_killed_stub_is_replaced_and_ctrl_c_ends_an_idle_server_with_0(
    serving: Serving, golden: dict[str, list[int]]
) -> None:
    server = Served.by(serving)
    engine = engine_pid(server, "continuous")
    (stub,) = serving.server.children()
    stream = GrpcStream(server).send("continuous", PROMPTS[0], **LONG)
    stream.receive()
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
    stream.cancel()
    serving.processes()
    serving.process.send_signal(signal.SIGINT)
    assert serving.event()["event"] == "draining"
    assert serving.event()["event"] == "stopped"
    assert serving.ended() == (0, "")


def test_plain_tritonserver_without_our_launcher(tmp_path: Path, golden: dict[str, list[int]]) -> None:
    """Two doors find one engine by the server's process alone, and nothing is left when the server has ended."""
    installation = find_tritonserver()
    ports = dict(zip(("http", "grpc", "metrics"), free_ports(3), strict=True))
    needed = ("PATH", "LD_LIBRARY_PATH", "HOME", "XDG_CACHE_HOME", "SLIPSTREAM_CACHE")
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
            env={name: environment[name] for name in needed if name in environment},
            cwd=tmp_path,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        server = Served(**{f"{name}_url": f"127.0.0.1:{port}" for name, port in ports.items()})
        wait_until(lambda: process.poll() is not None or is_ready(server), "the server is ready", seconds=120)
        assert process.poll() is None, (tmp_path / "log").read_text()
        for prompt in PROMPTS[:2]:
            assert ask(server, "continuous", prompt, max_tokens=NUM_GOLDEN).ids == golden[prompt]
            assert ask(server, "continuous_unary", prompt, max_tokens=NUM_GOLDEN).ids == golden[prompt]
        below = psutil.Process(process.pid).children(recursive=True)
        stubs = [each for each in below if each.name().startswith("triton_python")]
        engines = [each for each in below if "slipstream.engine.process" in each.cmdline()]
        assert (len(stubs), len(engines)) == (2, 1)
        assert_nothing_counts_twice_when_the_lead_moves(server)
        below += psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
        wait_until(lambda: not any(is_alive(each.pid) for each in below), "no process is left", seconds=10)
    finally:
        process.kill()
        process.wait()


def assert_nothing_counts_twice_when_the_lead_moves(server: Served) -> None:
    """Whichever of the two doors leads: each leaves once, the other goes on counting, and the first comes back."""
    triton = TritonHttp(server.http_url)
    counted = Metrics(server).value("generation_tokens_total", "continuous")
    assert counted == 4 * NUM_GOLDEN
    for leaving, staying in (("continuous", "continuous_unary"), ("continuous_unary", "continuous")):
        triton.unload(leaving, timeout_s=30)
        wait_until(lambda gone=leaving: triton.model_states()[gone] == "UNAVAILABLE", f"{leaving} is unloaded")
        ask(server, staying, PROMPTS[0], max_tokens=1)
        counted += 1
        wait_until(
            lambda least=counted: Metrics(server).value("generation_tokens_total", "continuous") >= least,
            "the token is counted",
        )
        wait_until_at_rest(server, ["continuous"])
        assert Metrics(server).value("generation_tokens_total", "continuous") == counted
        assert Metrics(server).value("engine_up", "continuous") == 1
        triton.load(leaving, timeout_s=60)


def is_ready(server: Served) -> bool:
    try:
        return TritonHttp(server.http_url).is_ready()
    except TritonUnreachable:
        return False
