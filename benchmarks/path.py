"""What the way from the engine to a client costs: `python -m benchmarks.path [--clients 32]`.

One closed loop over gRPC against a server of its own: the processor time of each process on the way, per generated
token, and how long first and last tokens are under way from the end of their step to the client.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time

import numpy as np
import psutil

from slipstream_client.comparison.run_figures import run_figures
from slipstream_client.load.arrivals import ClosedLoop
from slipstream_client.load.generator import LoadOptions, run_load
from slipstream_client.load.records import RequestRecord
from slipstream_client.load.targets.grpc_target import GrpcTarget
from slipstream_client.load.workload import make_workload
from slipstream_client.server.tritonserver import TritonServer

_ROLES = {"slipstream.engine.process": "engine", "triton_python_backend_stub": "door", "bin/tritonserver": "server"}


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=3, help="of each client")
    parser.add_argument("--workload", default="fixed:64,64")
    arguments = parser.parse_args()
    environment = {"SLIPSTREAM_MAX_NUM_SEQS": str(max(64, arguments.clients))}
    with TritonServer(
        ("continuous",), device="cpu", http_port=0, grpc_port=0, metrics_port=0, environment=environment
    ) as server:
        asyncio.run(_measure(server, arguments.clients, arguments.requests, arguments.workload))


async def _measure(server: TritonServer, clients: int, each: int, workload: str) -> None:
    requests = make_workload(workload, clients * each, seed=0).requests
    records: list[RequestRecord] = []
    async with GrpcTarget(server.grpc_url, "continuous") as target:
        before, start = _processor_seconds(), time.perf_counter()
        report = await run_load(target, requests, LoadOptions("path", ClosedLoop(clients)), records)
        seconds, after = time.perf_counter() - start, _processor_seconds()
    figures = run_figures(records)
    tokens = figures["output_tokens_per_s"] * seconds
    print(
        f"{workload}, {clients} clients: {figures['output_tokens_per_s']:.1f} tokens/s, TTFT P50 "
        f"{figures['ttft_ms']['p50']:.0f} ms, P99 {figures['ttft_ms']['p99']:.0f} ms"
    )
    on_the_way = [seconds * 1e3 for record in records for seconds in _on_the_way(record, report.start_s)]
    p50, p99 = np.percentile(on_the_way, [50, 99])
    print(f"from a step's end to the client: P50 {p50:.1f} ms, P99 {p99:.1f} ms")
    for role in (*_ROLES.values(), "client"):
        used = after.get(role, 0.0) - before.get(role, 0.0)
        print(f"{role:>7}: {used / seconds:5.0%} of a core, {used / tokens * 1e3:6.3f} ms a token")


def _on_the_way(record: RequestRecord, start_s: float) -> list[float]:
    """How long its first and its last token took from the engine to here; all processes share one clock."""
    assert record.stats is not None
    assert record.first is not None
    assert record.last is not None
    arrival_s = record.stats["arrival_s"]
    made_ms = (record.stats["first_token_ms"], record.stats["queue_ms"] + record.stats["inference_ms"])
    came_s = (record.first, record.last)
    return [start_s + came - arrival_s - made / 1e3 for came, made in zip(came_s, made_ms, strict=True)]


def _processor_seconds() -> dict[str, float]:
    """Processor time so far of each role's processes."""
    found: dict[str, float] = {"client": sum(psutil.Process(os.getpid()).cpu_times()[:2])}
    for process in psutil.process_iter(["cmdline", "cpu_times"]):
        command = " ".join(process.info["cmdline"] or [])
        for name, role in _ROLES.items():
            if name in command and process.info["cpu_times"] is not None:
                found[role] = found.get(role, 0.0) + sum(process.info["cpu_times"][:2])
                break
    return found


if __name__ == "__main__":
    main()
