"""The comparison: the same requests to each batcher at each concurrency, and everything that was seen, on disk."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream_client.aio import AsyncSlipstreamClient
from slipstream_client.comparison.engine_metrics import EngineWatch
from slipstream_client.comparison.estimate import readable, run_seconds
from slipstream_client.comparison.progress import CompareProgress
from slipstream_client.comparison.quality import compare_answers
from slipstream_client.comparison.resources import ProcessWatch
from slipstream_client.comparison.run_figures import run_figures, window_s
from slipstream_client.load.generator import LoadOptions, run_load
from slipstream_client.load.records import RequestRecord, write_records
from slipstream_client.load.workload import Workload, make_workload
from slipstream_client.tensors import ModelContract

WARM_UP = "fixed:48,24"
_WARM_UP_SEED = 999_983  # other texts than the measured ones, so that no cache knows those


@dataclass(frozen=True)
class Point:
    """One concurrency, and how many requests are sent at it."""

    concurrency: int
    requests: int


@dataclass(frozen=True)
class ComparePlan:
    """What is to be run."""

    batchers: tuple[str, ...]
    points: tuple[Point, ...]
    workload: Workload  # as long as the largest point needs
    retries: int = 0
    timeout_s: float = 300.0  # of one request

    @property
    def warm_up(self) -> Point:
        """As many requests at once as the largest point has."""
        most = min(max(point.concurrency for point in self.points), 16)
        return Point(most, most)


@dataclass(frozen=True)
class Target:
    """The server under test."""

    grpc_url: str
    contracts: Mapping[str, ModelContract]  # of every batcher
    metrics_url: str | None  # None: what the engine counts stays unknown
    process_ids: Callable[[], list[int]] | None  # None: not a server of ours, so its resources stay unknown


class Comparison:
    """Runs a plan; `results` and `records` hold what was measured so far, whatever happens."""

    def __init__(self, plan: ComparePlan, target: Target, out: Path, progress: CompareProgress) -> None:
        self.plan = plan
        self.target = target
        self.out = out
        self.progress = progress
        self.records: list[RequestRecord] = []
        self.results: dict[str, Any] = {
            "version": 1,
            "interrupted": False,
            "environment": {},
            "workload": plan.workload.describe(),
            "runs": [],
            "quality": compare_answers([]),
        }

    @property
    def failed(self) -> bool:
        """A request failed, or a batcher answered differently."""
        return any(run["failures"] for run in self.results["runs"]) or bool(self.results["quality"]["different"])

    def run(self) -> None:
        """Warm every batcher up, then measure; what is on disk is complete after every run.

        Ctrl-C ends it early: the results then say so, and hold the runs that were complete.
        """
        try:
            self._warm_up()
            # All batchers at one concurrency, then the next: what is compared was measured close in time.
            for point in self.plan.points:
                for batcher in self.plan.batchers:
                    self._measure(batcher, point)
                    self.write()
        except KeyboardInterrupt:
            self.results["interrupted"] = True
        self.write()

    def write(self) -> None:
        """Write results.json (whole or not at all) and requests.jsonl."""
        self.results["quality"] = compare_answers(self.records)
        self.results["workload"]["input_token_mismatches"] = len(self.input_mismatches())
        write_records(self.out / "requests.jsonl", self.records)
        unfinished = self.out / "results.json.part"
        unfinished.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, self.out / "results.json")

    def request_lines(self) -> list[dict[str, Any]]:
        """The records as in requests.jsonl."""
        return [asdict(record) for record in self.records]

    def input_mismatches(self) -> list[str]:
        """Ids of requests whose prompt had another number of tokens at the server than was meant."""
        meant = [request.input_tokens for request in self.plan.workload.requests]
        return [
            record.id
            for record in self.records
            if record.input_tokens is not None and meant[record.index] not in (None, record.input_tokens)
        ]

    def _warm_up(self) -> None:
        point = self.plan.warm_up
        requests = make_workload(WARM_UP, point.requests, _WARM_UP_SEED).requests
        expected_s = sum(run_seconds(batcher, requests, point.concurrency) for batcher in self.plan.batchers)
        start = time.perf_counter()
        for batcher in self.plan.batchers:
            options = LoadOptions(batcher, point.concurrency)
            records: list[RequestRecord] = []
            self._load(options, requests, records, lambda record: None)
            failures = [record for record in records if record.error]
            if failures:
                self.progress.say(f"warm-up of {batcher}: {len(failures)} requests failed: {failures[0].error}")
        factor = (time.perf_counter() - start) / expected_s
        self.progress.say(f"warmed up; about {readable(estimate_seconds(self.plan) * factor)} to go")

    def _measure(self, batcher: str, point: Point) -> None:
        options = LoadOptions(batcher, point.concurrency, retries=self.plan.retries)
        requests = self.plan.workload.requests[: point.requests]
        records: list[RequestRecord] = []
        engine, processes = self._watches(batcher)
        self.progress.run_started(options, len(requests))
        if engine:
            engine.start()
        if processes:
            processes.start()
        try:
            self._load(options, requests, records, self.progress.request_ended)
        finally:
            self.records += sorted(records, key=lambda record: record.index)
            process_figures = processes.stop(window_s(records)) if processes else None
            engine_figures = engine.stop() if engine else None
        run = run_figures(options, records, engine_figures, process_figures)
        self.results["runs"].append(run)
        self.progress.run_ended(options, run)

    def _watches(self, batcher: str) -> tuple[EngineWatch | None, ProcessWatch | None]:
        target, engine, processes = self.target, None, None
        own = target.contracts[batcher]
        if target.metrics_url:
            engine = EngineWatch(target.metrics_url, own.engine, own.name)
        if target.process_ids:
            others = {name for contract in target.contracts.values() for name in (contract.name, contract.engine)}
            processes = ProcessWatch(target.process_ids, others - {own.name, own.engine})
        return engine, processes

    def _load(
        self,
        options: LoadOptions,
        requests: Sequence[Any],
        records: list[RequestRecord],
        on_end: Callable[[RequestRecord], None],
    ) -> None:
        async def load() -> None:
            async with AsyncSlipstreamClient(
                self.target.grpc_url, options.batcher, timeout_s=self.plan.timeout_s
            ) as client:
                await run_load(client, requests, options, records, on_end)

        asyncio.run(load())


def estimate_seconds(plan: ComparePlan) -> float:
    """Time that the measured runs will take, from the step-time model alone."""
    return sum(
        run_seconds(batcher, plan.workload.requests[: point.requests], point.concurrency)
        for point in plan.points
        for batcher in plan.batchers
    )
