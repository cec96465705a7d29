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

# What nobody sees of how late threads wake on a busy machine: over HTTP of the server's writing and the kernel's work,
# over gRPC of the threads of both ends as well. Scripts tell things apart by more.
_UNSEEN_MS = {ScriptedHttp: 50.0, FakeTriton: 150.0}


@dataclass
class Loaded:
    """A run that has ended."""

    records: list[RequestRecord]  # in the order of the workload
    report: LoadReport
    tolerance_ms: float  # of a latency against the script: what nobody sees, and how late both ends were seen to be


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
    late_ms = 2 * report.lag.loop.max if report.lag.loop else 0.0
    late_ms += server.overslept_s * 1000
    if isinstance(server, ScriptedHttp):
        sent = {workload.requests[record.index].text: record.sent or 0.0 for record in records}
        first = [served for served in server.served if served.attempt == 0 and served.text in sent]
        late_ms += max((served.arrived - report.start_s - sent[served.text] for served in first), default=0.0) * 1000
    tolerance_ms = _UNSEEN_MS[type(server)] + late_ms
    return Loaded(sorted(records, key=lambda record: record.index), report, tolerance_ms)
