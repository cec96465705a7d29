"""Whole servers under our own load generator: Triton with our engine, and `llama-server`.

Both get the same requests in the same closed loop. Each run starts its server, warms it up, and ends it, so that never
more than one of them is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.llama_cpp import LlamaCpp
from slipstream_client.comparison.run_figures import run_figures
from slipstream_client.load.arrivals import ClosedLoop
from slipstream_client.load.generator import LoadOptions, run_load
from slipstream_client.load.records import RequestRecord
from slipstream_client.load.targets.grpc_target import GrpcTarget
from slipstream_client.load.targets.openai import OpenAiTarget
from slipstream_client.load.targets.target import LoadTarget
from slipstream_client.load.workload import make_workload
from slipstream_client.server.ports import free_ports
from slipstream_client.server.tethered_process import TetheredProcess
from slipstream_client.server.tritonserver import TritonServer

SEATS = 64
_CONTEXT = 1024  # tokens of each of llama-server's slots; the longest of `mixed` has 512 + 384
_START_S = 120.0


@dataclass(frozen=True)
class Load:
    """A closed loop of `clients`, each of which sends one request to warm up and then `requests` that count.

    Where lengths differ, one more of each keeps the loop full until the last of those has ended (`cools_down`): else
    the throughput would be that of the few longest answers, alone.
    """

    workload: str
    clients: int
    requests: int
    cools_down: bool = False

    @property
    def name(self) -> str:
        return f"{self.workload}, {self.clients} clients"


@dataclass(frozen=True)
class Served:
    """What clients got."""

    tokens_per_s: float  # generated
    p99_ttft_ms: float


def serve_ours(threads: int, load: Load, seed: int) -> Served:
    """What clients of tritonserver with the model `continuous` get, over gRPC."""
    environment = {"SLIPSTREAM_MAX_NUM_SEQS": str(SEATS), "SLIPSTREAM_THREADS": str(threads)}
    with TritonServer(
        ("continuous",), device="cpu", http_port=0, grpc_port=0, metrics_port=0, environment=environment
    ) as server:
        return asyncio.run(_send(lambda: GrpcTarget(server.grpc_url, "continuous"), load, seed))


def serve_llama(llama: LlamaCpp, threads: int, load: Load, seed: int) -> Served:
    """What clients of llama-server with the weights F16 get, over OpenAI's API."""
    with _llama_server(llama, threads) as url:
        # It closes a connection after a stream, and says before that it will keep it.
        return asyncio.run(_send(lambda: OpenAiTarget(url, "default", keeps_connections=False), load, seed))


async def _send(make_target: Callable[[], LoadTarget], load: Load, seed: int) -> Served:
    """Send one load to a server that was just started, so that no cache has met its prompts.

    Raises:
        RuntimeError: a request failed, or its answer had another length than was asked for.
    """
    cool_down = load.clients if load.cools_down else 0
    requests = make_workload(load.workload, load.clients * (load.requests + 1) + cool_down, seed).requests
    records: list[RequestRecord] = []
    options = LoadOptions("benchmark", ClosedLoop(load.clients), warm_up=load.clients, cool_down=cool_down)
    async with make_target() as target:
        await run_load(target, requests, options, records)
    found = run_figures(records)
    if found["failures"]:
        raise RuntimeError(f"{found['failures']} requests failed: {next(r.error for r in records if r.error)}")
    return Served(found["output_tokens_per_s"], found["ttft_ms"]["p99"])


@contextlib.contextmanager
def _llama_server(llama: LlamaCpp, threads: int) -> Iterator[str]:
    """The URL of a llama-server that is ready, on loopback."""
    (port,) = free_ports(1)
    command = [
        *(str(llama.server), "-m", str(llama.gguf("F16")), "-t", str(threads), "--host", "127.0.0.1"),
        *("--port", str(port), "--parallel", str(SEATS), "-c", str(SEATS * _CONTEXT), "--cont-batching"),
        # No prompt comes twice: keeping them would only cost it time.
        *("--cache-ram", "0"),
    ]
    with tempfile.TemporaryDirectory(prefix="llama-server-") as folder:
        log = Path(folder) / "log"
        process = TetheredProcess(command, dict(os.environ), Path(folder), log)
        try:
            _wait_until_ready(process, f"127.0.0.1:{port}", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.end_all(grace_s=5.0)


def _wait_until_ready(process: TetheredProcess, address: str, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while not _is_healthy(address):
        if process.exited.is_set() or time.monotonic() > deadline:
            state = "is not ready" if process.running else f"ended: {process.ending}"
            raise RuntimeError(f"llama-server {state}\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)


def _is_healthy(address: str) -> bool:
    """Whether it has loaded its model."""
    connection = http.client.HTTPConnection(address, timeout=5.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
