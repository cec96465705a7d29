"""`slipstream compare`: what each batching policy costs, measured on one server with the same requests."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from slipstream_client import control
from slipstream_client.commands.compare_output import show, write_pages
from slipstream_client.comparison.comparison import Comparison, estimate_seconds
from slipstream_client.comparison.environment import describe_environment, describe_server
from slipstream_client.comparison.estimate import readable
from slipstream_client.comparison.plan import ComparePlan
from slipstream_client.comparison.points import LoadFlags, WorkloadFlags, make_points
from slipstream_client.comparison.progress import CompareProgress
from slipstream_client.comparison.server import ServerUnderTest
from slipstream_client.comparison.server_facts import read_contracts
from slipstream_client.comparison.slo import PRESETS, parse_slo
from slipstream_client.comparison.variants import Variant, derive_repository, parse_variant
from slipstream_client.errors import SlipstreamError
from slipstream_client.interruption import ended_as_by_ctrl_c
from slipstream_client.report.changes import baseline_changes
from slipstream_client.report.folder import read_earlier
from slipstream_client.report.study import Study

_SERVER_START_S = 20
_BATCHERS = "static,dynamic,iterative,continuous"
_CONCURRENCY = "1,4,16"
_WORKLOAD = "mixed"

# Options have the names of other load generators beside ours; --help shows them in these groups.
_WHAT, _LOAD, _MEASURED, _SERVER = "What is compared", "Load", "How it is measured", "Server"


def compare(
    batchers: Annotated[
        str | None,
        typer.Option(help="Models to compare, separated by commas.", show_default=_BATCHERS, rich_help_panel=_WHAT),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help="MODEL[,SWITCH=VALUE...] with a parameter set otherwise, such as continuous,prefix_cache=off or "
            "dynamic,executor=transformers; or NAME,target=openai,url=URL,served_model=M. May be repeated.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            help="Variant that the others are measured against.",
            show_default="dynamic, else the first",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help="Lengths by name, or a file of requests (docs/comparison.md); variance is a sweep. May be repeated.",
            show_default=_WORKLOAD,
            rich_help_panel=_WHAT,
        ),
    ] = None,
    scale: Annotated[float, typer.Option(help="Factor of all lengths of the workload.", rich_help_panel=_WHAT)] = 1.0,
    max_input: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt; longer ones are cut.", rich_help_panel=_WHAT)
    ] = None,
    max_output: Annotated[
        int | None, typer.Option(min=1, help="Longest answer; longer ones are cut.", rich_help_panel=_WHAT)
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Closed loop: clients that wait for their answers.", show_default=_CONCURRENCY, rich_help_panel=_LOAD
        ),
    ] = None,
    request_rate: Annotated[
        str | None, typer.Option(help="Open loop: requests per second, or inf.", rich_help_panel=_LOAD)
    ] = None,
    burstiness: Annotated[
        float,
        typer.Option(
            help="Shape of the gamma distributed gaps; 1 is Poisson, less comes in bursts.", rich_help_panel=_LOAD
        ),
    ] = 1.0,
    trace: Annotated[
        str | None, typer.Option(help="Replay the arrival times of this file.", rich_help_panel=_LOAD)
    ] = None,
    trace_speed: Annotated[float, typer.Option(help="Factor of the trace's speed.", rich_help_panel=_LOAD)] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Most requests in flight of an open loop.", rich_help_panel=_LOAD)
    ] = None,
    ramp_up: Annotated[
        float, typer.Option(min=0, help="Seconds in which the load grows to its full height.", rich_help_panel=_LOAD)
    ] = 0.0,
    requests: Annotated[
        str | None,
        typer.Option(
            "--requests",
            "--num-prompts",
            "--request-count",
            help="Measured requests of each run, or one number for each load.",
            show_default="12,24,48 for concurrency 1,4,16",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    warm_up: Annotated[
        int,
        typer.Option(
            "--warmup-request-count",
            min=0,
            help="Requests at the start of each run that count in no figure.",
            rich_help_panel=_LOAD,
        ),
    ] = 0,
    cool_down: Annotated[
        int,
        typer.Option(
            "--cooldown-request-count",
            min=0,
            help="Requests at the end of each run that count in no figure.",
            rich_help_panel=_LOAD,
        ),
    ] = 0,
    repeats: Annotated[
        int,
        typer.Option(
            "--repeats",
            "--trials",
            min=1,
            max=1000,
            help="Runs of each variant at each load; 2 tell the noise.",
            rich_help_panel=_MEASURED,
        ),
    ] = 1,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            "--goodput",
            "--slo",
            help="chat, interactive, or limits in ms: 'ttft:200 tpot:50 e2el:3000'.",
            rich_help_panel=_MEASURED,
        ),
    ] = None,
    tune: Annotated[
        bool, typer.Option(help="Find the dynamic batcher's best delay and batch size first.", rich_help_panel=_WHAT)
    ] = True,
    seed: Annotated[
        int,
        typer.Option(
            "--seed",
            "--random-seed",
            min=0,
            help="Seed of the workload and of the arrivals.",
            rich_help_panel=_MEASURED,
        ),
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", "--result-dir", help="Folder for the results.", show_default="results/compare-<time>"),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(help="Folder of an earlier comparison to show the changes against.", rich_help_panel=_MEASURED),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url", "-u", help="gRPC endpoint of a running server; without it one is started.", rich_help_panel=_SERVER
        ),
    ] = None,
    http_url: Annotated[
        str | None,
        typer.Option(
            help="HTTP endpoint of that server.", show_default="port 8000 beside 8001", rich_help_panel=_SERVER
        ),
    ] = None,
    metrics_url: Annotated[
        str | None,
        typer.Option(
            help="Metrics endpoint of that server.", show_default="port 8002 beside 8001", rich_help_panel=_SERVER
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Language model: built-in name, folder or hub id.", rich_help_panel=_SERVER),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="auto, cpu or cuda.", show_default="as each model is configured", rich_help_panel=_SERVER),
    ] = None,
    retries: Annotated[
        int,
        typer.Option(min=0, help="Retries of a request that was refused as UNAVAILABLE.", rich_help_panel=_MEASURED),
    ] = 0,
    timeout: Annotated[
        float,
        typer.Option(min=0.1, max=86400, help="Seconds after which a request has failed.", rich_help_panel=_MEASURED),
    ] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print results.json instead of the tables.")] = False,
) -> None:
    """Send the same requests to each batcher; show throughput, latency and waste side by side, and why they differ.

    Exits with 1 if a request failed or two batchers gave different answers.
    """
    variants = _variants(batchers, variant)
    flags = LoadFlags(concurrency, request_rate, trace, trace_speed, burstiness, max_concurrency, ramp_up)
    offered = WorkloadFlags(workload or [_WORKLOAD], scale, max_input, max_output, seed)
    plan = ComparePlan(
        variants=variants,
        points=make_points(offered, flags.loads(_CONCURRENCY), requests, warm_up + cool_down),
        baseline=reference or _default_reference(variants),
        repeats=repeats,
        warm_up=warm_up,
        cool_down=cool_down,
        retries=retries,
        timeout_s=timeout,
        seed=seed,
        slos=tuple(dict.fromkeys([*map(parse_slo, goodput or []), *PRESETS.values()])),
    )
    earlier = None if baseline is None else read_earlier(baseline)
    folder = out or Path("results") / time.strftime("compare-%Y%m%d-%H%M%S")
    notes = Console(stderr=True)
    with (
        _folder_of_our_own(folder),
        ended_as_by_ctrl_c(),
        CompareProgress(notes, sum(1 for _ in plan.runs())) as progress,
    ):
        _announce(plan, progress, starts_server=url is None, tuned=tune)
        with _server(plan, url, http_url, metrics_url, model, device, folder) as (server, facts):
            comparison = Comparison(plan, server, folder, progress)
            comparison.results["environment"] = describe_environment() | facts
            comparison.results["command"] = ["slipstream", *sys.argv[1:]]
            unwritten = _run(comparison, tune)
    study = Study(comparison.results, comparison.request_lines(), comparison.steps)
    changes = None if earlier is None else baseline_changes(study.results, earlier)
    pages = None
    if comparison.results["runs"] and unwritten is None:
        pages, unwritten = write_pages(study, folder, changes)
    show(comparison, study, changes, pages, as_json, notes)
    if unwritten:
        raise SlipstreamError(f"cannot write to {folder}: {unwritten.strerror}")
    if comparison.results["interrupted"]:
        raise typer.Exit(130)
    if comparison.failed:
        raise typer.Exit(1)


def _variants(batchers: str | None, given: Sequence[str] | None) -> tuple[Variant, ...]:
    """Those of --batchers and of --variant; where neither is given, the four batchers."""
    text = _BATCHERS if batchers is None and not given else batchers or ""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    variants = tuple(parse_variant(each) for each in [*names, *(given or [])])
    if not variants:
        raise SlipstreamError("--batchers names no batcher")
    return variants


def _default_reference(variants: Sequence[Variant]) -> str:
    names = [variant.name for variant in variants]
    return "dynamic" if "dynamic" in names else names[0]


def _announce(plan: ComparePlan, progress: CompareProgress, *, starts_server: bool, tuned: bool) -> None:
    for workload in plan.workloads():
        points = [point for point in plan.points if point.workload is workload]
        counts = ", ".join(f"{point.num_requests} at {point.load.label}" for point in points)
        progress.say(f"workload {workload.name}, seed {workload.seed}: {counts}; sha256 {workload.sha256[:16]}")
    seconds = estimate_seconds(plan, tuned=tuned and starts_server) + (_SERVER_START_S if starts_server else 0)
    progress.say(f"estimate: about {readable(seconds)} (from the demo model's step times on two cores)")


@contextlib.contextmanager
def _server(
    plan: ComparePlan,
    url: str | None,
    http_url: str | None,
    metrics_url: str | None,
    model: str | None,
    device: str | None,
    folder: Path,
) -> Iterator[tuple[ServerUnderTest, dict[str, Any]]]:
    """The server to measure, started here unless `url` names one, and what it says about itself."""
    ours = [variant for variant in plan.variants if variant.url is None]
    if url is not None:
        if model is not None or device is not None:
            raise SlipstreamError("--model and --device are the server's: they cannot be changed with --url")
        switched = next((variant for variant in ours if variant.switches), None)
        if switched is not None:
            raise SlipstreamError(f"{switched.name}: switches are the server's: they cannot be set with --url")
        host, _, port = url.rpartition(":")
        beside = {"http": f"{host}:8000", "metrics": f"{host}:8002"} if port == "8001" else {}
        contracts, facts = read_contracts(url, [variant.served_name for variant in ours])
        described = describe_server(list(contracts.values()), facts)
        http, metrics = http_url or beside.get("http"), metrics_url or beside.get("metrics")
        yield ServerUnderTest(url, http, contracts, metrics, None), described
        return
    if not ours:
        yield ServerUnderTest("", None, {}, None, None), {}
        return
    # The server is imported where it is needed: a comparison with --url does without it.
    from slipstream_client.server.model_repository import find_repository
    from slipstream_client.server.paths import scratch_folder
    from slipstream_client.server.tritonserver import TritonServer

    with scratch_folder() as scratch:
        repository = scratch / "model_repository"
        derive_repository(find_repository(), ours, repository)
        with TritonServer(
            models=list(dict.fromkeys(variant.served_name for variant in ours)),
            model=model,
            device=device,
            http_port=0,
            grpc_port=0,
            metrics_port=0,
            log_path=folder / "tritonserver.log",
            repository=repository,
            admin=True,
        ) as server:
            contracts, facts = read_contracts(server.grpc_url, server.models)
            engines = [control.request(path, {"type": "status"}) for path in control.list_engines(server.runtime_dir)]
            devices = ", ".join(sorted({engine["device"] for engine in engines}))
            described = describe_server(list(contracts.values()), facts, model, devices)
            under_test = ServerUnderTest(
                server.grpc_url, server.http_url, contracts, server.metrics_url, server.process_ids, repository
            )
            yield under_test, described


@contextlib.contextmanager
def _folder_of_our_own(folder: Path) -> Iterator[None]:
    """Make the folder for the results, and keep another comparison out of it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise SlipstreamError(f"cannot write to {folder}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SlipstreamError(f"another comparison writes to {folder}") from error
        yield
    finally:
        os.close(descriptor)


def _run(comparison: Comparison, tuned: bool) -> OSError | None:
    """Run a comparison; returns why not all of it could be written, which is shown all the same."""
    try:
        comparison.run(tuned=tuned)
    except OSError as error:
        return error
    return None
