"""Load on a scripted server, and how exactly its figures can be known on a machine that others use too."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from fake_triton import FakeTriton
from scripted_http import ScriptedHttp
from slipstream_client.load.arrivals import ClosedLoop, Load
from slipstream_client.load.generator import LoadOptions, LoadReport, run_load
from slipstream_client.load.records import RequestRecord
from slipstream_client.load.targets import make_target
from slipstream_client.load.workload import Workload

# What a wake of a thread or of the event loop may take on a quiet machine; scripts tell things apart by 100 ms or more.
_WAKE_MS = 50.0


@dataclass
class Loaded:
    """A run that has ended."""

    records: list[RequestRecord]  # in the order of the workload
    report: LoadReport
    tolerance_ms: (
        float  # of a latency against the script: wakes, and by how much server and client were seen to be late
    )


def load(
    server: FakeTriton | ScriptedHttp,
    workload: Workload,
    arrivals: Load | None = None,
    *,
    target: str = "grpc",
    model: str = "continuous",
    timeout_s: float = 10.0,
    run: str = "run",
    **options: int | float,
) -> Loaded:
    """Send all of the workload, one at a time unless told otherwise."""
    records: list[RequestRecord] = []

    async def send() -> LoadReport:
        async with make_target(target, server.url, model, timeout_s) as entered:
            how = LoadOptions(run, arrivals or ClosedLoop(1), **options)  # type: ignore[arg-type]
            return await run_load(entered, workload.requests, how, records)

    report = asyncio.run(send())
    late_ms = report.lag.loop.max if report.lag.loop else 0.0
    tolerance_ms = _WAKE_MS + 2 * late_ms + server.overslept_s * 1000
    return Loaded(sorted(records, key=lambda record: record.index), report, tolerance_ms)
