"""Do NVIDIA's AIPerf and our load generator find the same? `python -m benchmarks.aiperf_agreement [--json]`.

Both send the same requests in the same closed loop to one real Triton server, in turn (A B C, C B A, ...): first to a
scripted model whose pace is known (benchmarks/paced), then to `continuous`. Every answer says when the model did what,
by the clock that a client on the same machine shares, so that each tool is also held against the model's own times. On
the paced model the two may differ by 5 %; on `continuous`, which is never as fast twice, by what repeats of our own
runs differ by (comparison/noise.py). `--split` gives the server and the tools cores of their own: a tool that takes
processor time from a model that computes changes what it measures. The first run installs AIPerf into an environment
of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks import aiperf
from slipstream.models.store import resolve
from slipstream_client.aio import AsyncSlipstreamClient
from slipstream_client.comparison.environment import describe_environment
from slipstream_client.comparison.noise import MetricNoise, pooled_noise
from slipstream_client.comparison.run_figures import measured, run_figures
from slipstream_client.load.arrivals import ClosedLoop
from slipstream_client.load.generator import LoadOptions, run_load
from slipstream_client.load.records import RequestRecord
from slipstream_client.load.targets import make_target
from slipstream_client.load.workload import WorkloadRequest, make_workload
from slipstream_client.server.tritonserver import TritonServer

TOLERATED = 0.05  # on the paced model
TOOLS = ("aiperf, HTTP", "ours, HTTP", "ours, gRPC")
AIPERF, OURS = TOOLS[:2]  # what is compared
METRICS = {
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "output tokens/s",
    "ttft_ms": "TTFT p50 ms",
    "itl_ms": "ITL p50 ms",
    "e2e_ms": "E2E p50 ms",
}
JUDGED = ("requests_per_s", "output_tokens_per_s", "ttft_ms")
_PACED = Path(__file__).parent / "paced"
_TOKENIZER = "smollm2-135m"
_TRIES = 5
# Output tokens of every answer. What a tool takes from an answer to the next request is little beside the paced ones.
_ANSWERS = {"paced": 128, "continuous": 32}

Figures = Mapping[str, float]  # by metric


@dataclass(frozen=True)
class Run:
    """What a tool found, and what the model says of the same requests."""

    model: str
    concurrency: int
    tool: str
    figures: Figures
    models_own: Figures
    others: float  # share of the machine's processor time that others than tool and server had meanwhile

    @property
    def point(self) -> tuple[str, int]:
        return self.model, self.concurrency


def main() -> None:
    """Run the benchmark and print a table of each point, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(_ANSWERS), help="comma-separated: paced, continuous")
    parser.add_argument("--concurrency", default="4,16", help="comma-separated clients")
    parser.add_argument("--rounds", type=int, default=4, help="measured requests of each client")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each tool")
    parser.add_argument(
        "--max-others", type=float, default=1.0, help="repeat a run in which other processes had more of the machine"
    )
    parser.add_argument("--split", action="store_true", help="the server has the second half of the cores for itself")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.repeats < 2:
        parser.error("--repeats: at least 2, as one run says nothing of how far two of them lie apart")
    cores = sorted(os.sched_getaffinity(0))
    if arguments.split and len(cores) < 2:
        parser.error("--split: there is only one core")
    servers, tools = (cores[len(cores) // 2 :], cores[: len(cores) // 2]) if arguments.split else (cores, cores)
    executable = aiperf.install()
    runs: list[Run] = []
    for model in arguments.models.split(","):
        repository = _PACED if model == "paced" else None
        os.sched_setaffinity(0, servers)  # what is started keeps it
        with TritonServer((model,), http_port=0, grpc_port=0, metrics_port=0, repository=repository) as server:
            os.sched_setaffinity(0, tools)
            for concurrency in map(int, arguments.concurrency.split(",")):
                count = concurrency * (arguments.rounds + 1)
                requests = make_workload(f"fixed:32,{_ANSWERS[model]}", count).requests
                _run(server, OURS, model, requests, concurrency, executable)  # warms the server up
                for repeat in range(arguments.repeats):
                    for tool in TOOLS if repeat % 2 == 0 else TOOLS[::-1]:
                        tries: list[Run] = []
                        while not tries or (tries[-1].others > arguments.max_others and len(tries) < _TRIES):
                            tries.append(_run(server, tool, model, requests, concurrency, executable))
                            print(f"{model} c{concurrency} {tool}: {_format(tries[-1])}", file=sys.stderr)
                        # Chosen by what disturbed it, not by what it found.
                        runs.append(min(tries, key=lambda run: run.others))
    if arguments.json:
        environment = describe_environment() | {"aiperf": aiperf.VERSION}
        document = {"version": 1, "environment": environment, "runs": [asdict(run) for run in runs]}
        print(json.dumps(document, indent=1))
        return
    for point in dict.fromkeys(run.point for run in runs):
        print(table(runs, point))


def table(runs: Sequence[Run], point: tuple[str, int]) -> str:
    """The means over the repeats at one point, in Markdown, and whether the tools agree."""
    model, concurrency = point
    here = [run for run in runs if run.point == point]
    tools = {tool: [run for run in here if run.tool == tool] for tool in TOOLS}
    repeats = len(tools[OURS])
    lines = [
        f"`{model}`, {concurrency} clients; other processes had {min(run.others for run in here):.0%} to "
        f"{max(run.others for run in here):.0%} of the machine",
        "",
        _row("", METRICS.values()),
        _row("---", ["---:"] * len(METRICS)),
    ]
    for tool, of_tool in tools.items():
        found = _mean(run.figures for run in of_tool)
        own = _mean(run.models_own for run in of_tool)
        lines.append(_row(tool, (f"{found[metric]:.2f}" for metric in METRICS)))
        lines.append(_row("the model's own times of these runs", (f"{own[metric]:.2f}" for metric in METRICS)))
    ratios = {metric: _ratio(tools[OURS], tools[AIPERF], metric) for metric in METRICS}
    floors = {metric: _noise(runs, model, metric).floor(repeats, repeats) for metric in METRICS}
    bars = {metric: TOLERATED if model == "paced" else floors[metric] or 0.0 for metric in METRICS}
    beyond = {metric: ratio / _ratio(tools[OURS], tools[AIPERF], metric, own=True) for metric, ratio in ratios.items()}
    lines += [
        _row("ours / aiperf, HTTP", (f"{ratio:.3f}" for ratio in ratios.values())),
        _row("the same, each divided by the model's own", (f"{ratio:.3f}" for ratio in beyond.values())),
        _row("two equal means differ by less than (A/A)", (f"{floor:.1%}" for floor in floors.values())),
        "",
    ]
    for metric in JUDGED:
        inside = abs(ratios[metric] - 1) <= bars[metric]
        lines.append(
            f"* {METRICS[metric]}: {ratios[metric] - 1:+.1%}, {'inside' if inside else 'OUTSIDE'} {bars[metric]:.1%}"
        )
    return "\n".join(lines) + "\n"


def _run(
    server: TritonServer,
    tool: str,
    model: str,
    requests: Sequence[WorkloadRequest],
    concurrency: int,
    executable: Path,
) -> Run:
    """One run of a tool; one round of requests warms it up."""
    before, ours_before = psutil.cpu_times(), _processor_s(server)
    if tool == AIPERF:
        figures, stats = _load_with_aiperf(server, model, requests, concurrency, executable)
    else:
        target = "grpc" if tool.endswith("gRPC") else "generate_stream"
        figures, stats = asyncio.run(_load_with_ours(server, target, model, requests, concurrency))
    after, ours = psutil.cpu_times(), _processor_s(server) - ours_before
    idle = sum(getattr(after, name) - getattr(before, name) for name in ("idle", "iowait"))
    others = max(0.0, 1 - (idle + ours) / (sum(after[:8]) - sum(before[:8])))  # [8:] are parts of user and nice
    return Run(model, concurrency, tool, figures, _models_own(stats, requests[0].stop_length), others)


def _processor_s(server: TritonServer) -> float:
    """Processor time so far of this process, of what it has started and waited for, and of the server."""
    living = (psutil.Process(pid).cpu_times() for pid in server.process_ids())
    return sum(psutil.Process().cpu_times()[:4]) + sum(times.user + times.system for times in living)


async def _load_with_ours(
    server: TritonServer, target: str, model: str, requests: Sequence[WorkloadRequest], concurrency: int
) -> tuple[Figures, list[dict[str, Any]]]:
    records: list[RequestRecord] = []
    url = server.grpc_url if target == "grpc" else server.http_url
    options = LoadOptions("benchmark", ClosedLoop(concurrency), warm_up=concurrency)
    async with make_target(target, url, model) as entered:
        await run_load(entered, requests, options, records)
    found = run_figures(records)
    if found["failures"]:
        raise RuntimeError(f"{found['failures']} requests failed: {next(r.error for r in records if r.error)}")
    # What AIPerf calls ITL is a mean for each request, as our TPOT is.
    figures = {name: found[name]["p50"] for name in ("ttft_ms", "e2e_ms")} | {"itl_ms": found["tpot_ms"]["p50"]}
    figures |= {name: found[name] for name in ("requests_per_s", "output_tokens_per_s")}
    return figures, [record.stats for record in measured(records) if record.stats]


def _load_with_aiperf(
    server: TritonServer, model: str, requests: Sequence[WorkloadRequest], concurrency: int, executable: Path
) -> tuple[Figures, list[dict[str, Any]]]:
    async def ask_contract() -> Any:
        async with AsyncSlipstreamClient(server.grpc_url, model) as client:
            return await client.contract()

    found = aiperf.run(
        executable,
        server.http_url,
        asyncio.run(ask_contract()),
        requests,
        concurrency,
        warm_up=concurrency,
        cache_salt=secrets.token_hex(8),
        tokenizer=resolve(_TOKENIZER),
    )
    if found.failures:
        raise RuntimeError(f"{found.failures} requests of aiperf failed")
    figures = {
        "requests_per_s": found.value("request_throughput"),
        "output_tokens_per_s": found.value("output_token_throughput"),
        "ttft_ms": found.value("time_to_first_token", "p50"),
        "itl_ms": found.value("inter_token_latency", "p50"),
        "e2e_ms": found.value("request_latency", "p50"),
    }
    return figures, found.stats


def _models_own(stats: Sequence[Mapping[str, Any]], tokens: int) -> Figures:
    """The figures by the clock of the model: from a request's arrival there to when its tokens were there."""
    e2e_ms = [each["queue_ms"] + each["inference_ms"] for each in stats]
    duration_s = max(each["arrival_s"] + e2e / 1000 for each, e2e in zip(stats, e2e_ms, strict=True)) - min(
        each["arrival_s"] for each in stats
    )
    decode_ms = [e2e - each["first_token_ms"] for each, e2e in zip(stats, e2e_ms, strict=True)]
    return {
        "requests_per_s": len(stats) / duration_s,
        "output_tokens_per_s": len(stats) * tokens / duration_s,
        "ttft_ms": statistics.median(each["first_token_ms"] for each in stats),
        "itl_ms": statistics.median(decode_ms) / (tokens - 1),
        "e2e_ms": statistics.median(e2e_ms),
    }


def _noise(runs: Sequence[Run], model: str, metric: str) -> MetricNoise:
    """Of our own repeats on a model, over all points and both protocols."""
    groups: dict[tuple[int, str], list[float]] = {}
    for run in runs:
        if run.model == model and run.tool != AIPERF:
            groups.setdefault((run.concurrency, run.tool), []).append(run.figures[metric])
    return pooled_noise([np.array(group) for group in groups.values()])


def _ratio(runs: Sequence[Run], others: Sequence[Run], metric: str, *, own: bool = False) -> float:
    """Of means over the repeats: of what the tools found, or of the model's own figures."""
    value, other = (_mean(run.models_own if own else run.figures for run in each)[metric] for each in (runs, others))
    return value / other


def _mean(figures: Iterable[Figures]) -> Figures:
    collected = list(figures)
    return {metric: statistics.mean(each[metric] for each in collected) for metric in METRICS}


def _row(head: str, cells: Iterable[str]) -> str:
    return " | ".join((f"| {head}", *cells)) + " |"


def _format(run: Run) -> str:
    figures = (f"{name} {run.figures[metric]:.2f}" for metric, name in METRICS.items())
    return f"{', '.join(figures)}; others had {run.others:.0%} of the machine"


if __name__ == "__main__":
    main()
