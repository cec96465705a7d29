"""One run of one variant: the load, what was watched meanwhile, and the figures of both."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream_client.comparison.engine_metrics import EngineFigures
from slipstream_client.comparison.estimate import LOCK_STEP
from slipstream_client.comparison.explain import explain_engine_time, explain_request_time, explain_slots
from slipstream_client.comparison.plan import ComparePlan, PlannedRun
from slipstream_client.comparison.resources import ProcessFigures
from slipstream_client.comparison.run_figures import measured, run_figures, window_s
from slipstream_client.comparison.server import ServerUnderTest
from slipstream_client.load.generator import LoadOptions, LoadReport, run_load
from slipstream_client.load.lag import too_late
from slipstream_client.load.records import RequestRecord
from slipstream_client.load.targets import make_target
from slipstream_client.tensors import RequestFailed

Step = Mapping[str, Any]
OnEnd = Callable[[RequestRecord], None]


@dataclass
class Measurement:
    """What was seen of one run; `records` grow while it runs."""

    planned: PlannedRun
    records: list[RequestRecord] = field(default_factory=list)
    steps: Sequence[Step] = ()
    steps_missing: int = 0
    clock_offset_s: float | None = None
    report: LoadReport | None = None
    streams: bool = False
    engine: EngineFigures = field(default_factory=EngineFigures)
    processes: ProcessFigures = field(default_factory=ProcessFigures)

    def figures(self, plan: ComparePlan) -> dict[str, Any]:
        """Its entry of "runs" in results.json."""
        planned, report = self.planned, self.report
        assert report is not None
        figures = run_figures(self.records, plan.slos)
        invalid = self._invalid_because(figures)
        return {
            "id": planned.id,
            "variant": planned.variant.name,
            "model": planned.variant.model,
            "executor": planned.variant.executor,
            "streams": self.streams,
            "workload": planned.point.workload.name,
            "load": planned.point.load.describe(),
            "point": planned.point.load.label,
            "repeat": planned.repeat,
            "clock_offset_s": self.clock_offset_s,
            "valid": not invalid,
            "invalid_because": invalid,
            "client_lag_ms": report.lag.worst(),
            "client_processes": report.processes,
            **figures,
            **self.engine.as_results(),
            **self.processes.as_results(),
            **self._accounts(),
        }

    def _accounts(self) -> dict[str, Any]:
        counted = measured(self.records)
        sent = [record.sent for record in counted if record.sent is not None]
        start_s = min(sent, default=0.0)
        lock_step = self.planned.variant.model in LOCK_STEP
        complete = [] if self.steps_missing else self.steps
        return {
            "steps_missing": self.steps_missing,
            "slots": explain_slots(complete, self.engine.computed_tokens),
            "engine_time_s": explain_engine_time(self.steps, start_s, start_s + window_s(counted)),
            "request_time_ms": explain_request_time(counted, self.steps, self.clock_offset_s, lock_step=lock_step),
        }

    def _invalid_because(self, figures: Mapping[str, Any]) -> list[str]:
        assert self.report is not None
        medians = [figures[name]["p50"] for name in ("ttft_ms", "e2e_ms") if figures[name]]
        late = too_late(self.report.lag, min(medians, default=None))
        return [late] if late else []


def measure(server: ServerUnderTest, plan: ComparePlan, seen: Measurement, on_end: OnEnd) -> None:
    """Put one variant under one load and watch; what has ended before an interruption is in `seen` all the same."""
    variant = seen.planned.variant
    engine, processes = server.engine_watch(variant), server.process_watch(variant)
    steps = server.step_watch(variant)
    for watch in (engine, processes):
        if watch:
            watch.start()
    try:
        seen.report, seen.streams = asyncio.run(_load(server, plan, seen, on_end))
    finally:
        seen.records.sort(key=lambda record: record.index)
        if processes:
            seen.processes = processes.stop(window_s(seen.records))
        if engine:
            seen.engine = engine.stop()
    if steps:
        seen.clock_offset_s = steps.clock_offset_s(seen.report.start_s)
        with contextlib.suppress(RequestFailed):  # the engine has died: its requests say so
            seen.steps = steps.stop(seen.report.start_s)
        seen.steps_missing = steps.missing(seen.steps)


async def _load(
    server: ServerUnderTest, plan: ComparePlan, seen: Measurement, on_end: OnEnd
) -> tuple[LoadReport, bool]:
    variant, point = seen.planned.variant, seen.planned.point
    options = LoadOptions(
        seen.planned.id,
        point.load,
        warm_up=plan.warm_up,
        cool_down=plan.cool_down,
        retries=plan.retries,
        seed=plan.seed,
    )
    url = server.url_of(variant)
    async with make_target(variant.target, url, variant.served_name, plan.timeout_s) as target:
        report = await run_load(target, point.requests, options, seen.records, on_end)
        return report, target.streams
