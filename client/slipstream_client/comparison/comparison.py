"""The comparison: the same requests to each variant at each point, and everything that was seen, on disk."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from slipstream_client.comparison.estimate import readable, run_seconds
from slipstream_client.comparison.margins import add_margins
from slipstream_client.comparison.measurement import Measurement, measure
from slipstream_client.comparison.plan import ComparePlan, PlannedRun, Point
from slipstream_client.comparison.progress import CompareProgress
from slipstream_client.comparison.quality import compare_answers
from slipstream_client.comparison.server import ServerUnderTest
from slipstream_client.comparison.statistics import summarise_runs
from slipstream_client.comparison.tuning import grid, is_tunable, tune
from slipstream_client.comparison.variants import Variant
from slipstream_client.load.arrivals import ClosedLoop, offered_sha256
from slipstream_client.load.records import RequestRecord, write_records
from slipstream_client.load.workload import make_workload

WARM_UP = "fixed:48,24"
_WARM_UP_SEED = 999_983  # other texts than the measured ones, so that no cache knows those
_MOST_WARM_UP = 16
_SCORING_MODEL = "continuous"  # its answers can have log-probabilities
_FILES = ("requests.jsonl", "steps.jsonl", "results.json")
_TUNING_ROUNDS = 2  # requests of each client in a run of the grid


class Comparison:
    """Runs a plan; `results`, `records` and `steps` hold what was measured so far, whatever happens."""

    def __init__(self, plan: ComparePlan, server: ServerUnderTest, out: Path, progress: CompareProgress) -> None:
        self.plan = plan
        self.server = server
        self.out = out
        self.progress = progress
        self.records: list[RequestRecord] = []
        self.steps: list[dict[str, Any]] = []
        self.results: dict[str, Any] = {
            "version": 2,
            "interrupted": False,
            "command": [],
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "environment": {},
            "plan": plan.describe(),
            "workloads": self._describe_workloads(),
            "tuning": None,
            "runs": [],
            **summarise_runs([], {}, plan.baseline),
            "quality": compare_answers([], []),
        }

    @property
    def failed(self) -> bool:
        """A request failed, or two batchers answered differently."""
        return any(run["failures"] for run in self.results["runs"]) or bool(self.results["quality"]["different"])

    def run(self, *, tuned: bool = True) -> None:
        """Warm every variant up, tune the dynamic batcher, then measure; what is on disk is complete after every run.

        Ctrl-C ends it early: the results then say so, and hold the runs that were complete.

        Raises:
            SlipstreamError: a request does not fit into a model's context; nothing was measured.
        """
        self.results["interrupted"] = True  # so says what is on disk until the last run is complete
        try:
            self._require_room()
            self._warm_up(tuned=tuned)
            if tuned:
                self._tune()
            for planned in self.plan.runs():
                self._measure(planned)
                self.write()
            self.results["interrupted"] = False
        except KeyboardInterrupt:
            pass
        self._conclude()
        if self.results["runs"]:  # else what an earlier comparison has left in the folder is worth more
            self.write()

    def write(self) -> None:
        """Write requests.jsonl, steps.jsonl and results.json; where there is no room, what was there before stays.

        Raises:
            OSError: they cannot be written.
        """
        requests, steps, results = parts = [self.out / f"{name}.part" for name in _FILES]
        try:
            write_records(requests, self.records)
            with steps.open("w", encoding="utf-8") as lines:
                lines.writelines(json.dumps(step) + "\n" for step in self.steps)
            results.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
            for part in parts:
                os.replace(part, part.with_suffix(""))
        finally:
            for part in parts:
                part.unlink(missing_ok=True)

    def request_lines(self) -> list[dict[str, Any]]:
        """The records as in requests.jsonl."""
        return [asdict(record) for record in self.records]

    def input_mismatches(self) -> list[str]:
        """Ids of requests whose prompt had another number of tokens at the server than was meant."""
        offered = {planned.id: planned.point.requests for planned in self.plan.runs()}
        return [
            record.id
            for record in self.records
            if record.input_tokens is not None
            and offered[record.run][record.index].input_tokens not in (None, record.input_tokens)
        ]

    def _conclude(self) -> None:
        """What follows from all runs together."""
        results, runs = self.results, self.results["runs"]
        by_run: dict[str, list[RequestRecord]] = defaultdict(list)
        for record in self.records:
            by_run[record.run].append(record)
        results |= summarise_runs(runs, by_run, self.plan.baseline, self.plan.slos[0].name if self.plan.slos else None)
        results["quality"] = compare_answers(self.records, runs)
        results["quality"]["input_token_mismatches"] = len(self.input_mismatches())
        agreement = results["quality"]["agreement"]
        scoring = [v.served_name for v in self.plan.variants if v.model == _SCORING_MODEL and v.url is None]
        if agreement and scoring and not results["interrupted"]:
            requests = {run.id: {each.index: each for each in run.point.requests} for run in self.plan.runs()}
            add_margins(agreement, self.records, requests, self.server.grpc_url, scoring[0])

    def _describe_workloads(self) -> list[dict[str, Any]]:
        described = []
        for workload in self.plan.workloads():
            points = [point for point in self.plan.points if point.workload is workload]
            offered = {
                point.load.label: offered_sha256(
                    point.requests, point.load.intended_times(point.num_requests, self.plan.seed)
                )
                for point in points
            }
            described.append(workload.describe() | {"offered": offered})
        return described

    def _require_room(self) -> None:
        for variant in self.plan.variants:
            context = self.server.context(variant)
            if context is not None:
                for workload in self.plan.workloads():
                    workload.require_room(context, variant.name)

    def _warm_up(self, *, tuned: bool) -> None:
        most = min(max(point.num_requests for point in self.plan.points), _MOST_WARM_UP)
        workload = make_workload(WARM_UP, most, _WARM_UP_SEED)
        point = Point(workload, ClosedLoop(most), most)
        plan = replace(self.plan, points=(point,), warm_up=0, cool_down=0)
        expected_s = sum(estimate(variant, point) for variant in plan.variants)
        start = time.perf_counter()
        for variant in plan.variants:
            seen = Measurement(PlannedRun(variant, point, 0))
            measure(self.server, plan, seen, lambda record: None)
            failures = [record for record in seen.records if record.error]
            if failures:
                self.progress.say(f"warm-up of {variant.name}: {len(failures)} requests failed: {failures[0].error}")
        factor = (time.perf_counter() - start) / expected_s
        seconds = estimate_seconds(self.plan, tuned=tuned and self.server.repository is not None)
        self.progress.say(f"warmed up; about {readable(seconds * factor)} to go")

    def _tune(self) -> None:
        """Find the best settings of Triton's dynamic batcher, where the server is ours to set."""
        variants = _tunable(self.plan)
        if not variants or self.server.repository is None:
            return
        short = _tuning_point(self.plan)
        assert isinstance(short.load, ClosedLoop)
        plan = replace(self.plan, points=(short,), warm_up=0, cool_down=0, repeats=1)

        def measure_short(variant: Variant, said: str) -> dict[str, Any]:
            seen = Measurement(PlannedRun(variant, short, 0))
            measure(self.server, plan, seen, lambda record: None)
            run = seen.figures(plan)
            rows, calls = run["triton_inferences"], run["triton_executions"]
            self.progress.say(f"tuning {variant.name}, {said}: {run['output_tokens_per_s']:.1f} tokens/s")
            return run | {"mean_batch": rows / calls if rows and calls else None}

        size = self.server.contracts[variants[0].served_name].max_batch_size
        tuning = tune(variants, self.server.repository, size, self.server.load, measure_short)
        about = {"workload": short.workload.name, "concurrency": short.load.concurrency, "requests": short.num_requests}
        self.results["tuning"] = tuning | about

    def _measure(self, planned: PlannedRun) -> None:
        seen = Measurement(planned)
        self.progress.run_started(planned)
        try:
            measure(self.server, self.plan, seen, self.progress.request_ended)
        finally:
            self.records += seen.records
        self.steps += [{"run": planned.id, **step} for step in seen.steps]
        run = seen.figures(self.plan)
        self.results["runs"].append(run)
        self.progress.run_ended(run)


def estimate(variant: Variant, point: Point, seed: int = 0) -> float:
    """Seconds that one run will take, from the step-time model alone."""
    requests, load = point.requests, point.load
    if isinstance(load, ClosedLoop):
        return run_seconds(variant.model, variant.executor, requests, load.concurrency)
    times = load.intended_times(len(requests), seed)
    return max(times[-1], run_seconds(variant.model, variant.executor, requests, len(requests)))


def estimate_seconds(plan: ComparePlan, *, tuned: bool = False) -> float:
    """Seconds that all measured runs will take, and where it is `tuned` the search for the dynamic batcher's best."""
    measured = sum(estimate(planned.variant, planned.point, plan.seed) for planned in plan.runs())
    if not tuned or not _tunable(plan):
        return measured
    return measured + len(grid(_MOST_WARM_UP)) * estimate(_tunable(plan)[0], _tuning_point(plan))


def _tunable(plan: ComparePlan) -> list[Variant]:
    """The variants of the dynamic batcher, the native ones first."""
    return sorted(filter(is_tunable, plan.variants), key=lambda variant: variant.executor != "native")


def _tuning_point(plan: ComparePlan) -> Point:
    """A short run at the point with the most clients."""
    point = max(plan.points, key=lambda point: getattr(point.load, "concurrency", 0))
    clients = getattr(point.load, "concurrency", _MOST_WARM_UP)
    return Point(point.workload, ClosedLoop(clients), min(_TUNING_ROUNDS * clients, point.num_requests))
