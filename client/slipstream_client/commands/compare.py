"""`slipstream compare`: what each batching policy costs, measured on one server with the same requests."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from slipstream_client import control
from slipstream_client.comparison.comparison import ComparePlan, Comparison, Point, Target, estimate_seconds
from slipstream_client.comparison.environment import describe_environment, describe_server
from slipstream_client.comparison.estimate import readable
from slipstream_client.comparison.progress import CompareProgress
from slipstream_client.comparison.server_facts import read_contracts
from slipstream_client.errors import SlipstreamError
from slipstream_client.interruption import ended_as_by_ctrl_c
from slipstream_client.load.workload import make_workload
from slipstream_client.report.batching import batching_doubt
from slipstream_client.report.compare_table import compare_tables

_SERVER_START_S = 20
_DIFFERENCES_SHOWN = 10


def compare(
    batchers: Annotated[
        str, typer.Option(help="Models to compare, separated by commas.")
    ] = "static,dynamic,iterative,continuous",
    workload: Annotated[str, typer.Option(help="mixed, equal or fixed:IN,OUT (tokens).")] = "mixed",
    concurrency: Annotated[str, typer.Option(help="Requests in flight; one run for each number.")] = "1,4,16",
    requests: Annotated[
        str | None,
        typer.Option(
            help="Requests of each run, or one number for each concurrency.", show_default="12,24,48 for 1,4,16"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the workload.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results.", show_default="results/compare-<time>")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="gRPC endpoint of a running server; without it one is started.")
    ] = None,
    metrics_url: Annotated[
        str | None, typer.Option(help="Metrics endpoint of that server.", show_default="port 8002 beside 8001")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Language model: built-in name, folder or hub id.")] = None,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu or cuda.", show_default="as each model is configured")
    ] = None,
    retries: Annotated[int, typer.Option(min=0, help="Retries of a request that was refused as UNAVAILABLE.")] = 0,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=86400, help="Seconds after which a request has failed.")
    ] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print results.json instead of the table.")] = False,
) -> None:
    """Send the same requests to each batcher and show throughput, latency and waste side by side.

    Exits with 1 if a request failed or two batchers gave different answers.
    """
    names = tuple(dict.fromkeys(name.strip() for name in batchers.split(",") if name.strip()))
    if not names:
        raise SlipstreamError("--batchers names no batcher")
    points = _points(concurrency, requests)
    plan = ComparePlan(
        batchers=names,
        points=points,
        workload=make_workload(workload, max(point.requests for point in points), seed),
        retries=retries,
        timeout_s=timeout,
    )
    folder = out or Path("results") / time.strftime("compare-%Y%m%d-%H%M%S")
    notes = Console(stderr=True)
    with (
        _folder_of_our_own(folder),
        ended_as_by_ctrl_c(),
        CompareProgress(notes, len(names) * len(points)) as progress,
    ):
        _announce(plan, progress, starts_server=url is None)
        with _target(plan, url, metrics_url, model, device, folder) as (target, server_facts):
            comparison = Comparison(plan, target, folder, progress)
            comparison.results["environment"] = describe_environment() | server_facts
            report, unwritten = _measure(comparison)
    _show(comparison, report, as_json, notes)
    if unwritten:
        raise SlipstreamError(f"cannot write to {folder}: {unwritten.strerror}")
    if comparison.results["interrupted"]:
        raise typer.Exit(130)
    if comparison.failed:
        raise typer.Exit(1)


def _points(concurrency: str, requests: str | None) -> tuple[Point, ...]:
    levels = list(dict.fromkeys(_whole_numbers("--concurrency", concurrency)))
    if requests is None:
        # Enough for the tail to mean something, growing slowly, and whole batches for a client that batches.
        counts = [level * math.ceil(12 / math.sqrt(level)) for level in levels]
    else:
        counts = _whole_numbers("--requests", requests)
        if len(counts) == 1:
            counts *= len(levels)
    if len(counts) != len(levels):
        raise SlipstreamError(f"--requests has {len(counts)} numbers for {len(levels)} concurrencies")
    return tuple(Point(level, count) for level, count in zip(levels, counts, strict=True))


def _whole_numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise SlipstreamError(f"{option} {text!r} is no list of whole numbers") from None
    if min(numbers) < 1:
        raise SlipstreamError(f"{option} {text!r}: every number must be at least 1")
    return numbers


def _announce(plan: ComparePlan, progress: CompareProgress, *, starts_server: bool) -> None:
    workload = plan.workload
    counts = ", ".join(f"{point.requests} at concurrency {point.concurrency}" for point in plan.points)
    progress.say(f"workload {workload.name}, seed {workload.seed}: {counts}; sha256 {workload.sha256[:16]}")
    seconds = estimate_seconds(plan) + (_SERVER_START_S if starts_server else 0)
    progress.say(f"estimate: about {readable(seconds)} (from the demo model's step times on two cores)")


@contextlib.contextmanager
def _target(
    plan: ComparePlan, url: str | None, metrics_url: str | None, model: str | None, device: str | None, folder: Path
) -> Iterator[tuple[Target, dict[str, Any]]]:
    """The server to measure, started here unless `url` names one, and what it says about itself."""
    if url is not None:
        if model is not None or device is not None:
            raise SlipstreamError("--model and --device are the server's: they cannot be changed with --url")
        host, _, port = url.rpartition(":")
        metrics = metrics_url or (f"{host}:8002" if port == "8001" else None)
        contracts, facts = read_contracts(url, plan.batchers)
        yield Target(url, contracts, metrics, None), describe_server(list(contracts.values()), facts)
        return
    # The server is imported where it is needed: a comparison with --url does without it.
    from slipstream_client.server.tritonserver import TritonServer

    with TritonServer(
        models=list(plan.batchers),
        model=model,
        device=device,
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        log_path=folder / "tritonserver.log",
    ) as server:
        contracts, facts = read_contracts(server.grpc_url, plan.batchers)
        engines = [control.request(path, {"type": "status"}) for path in control.list_engines(server.runtime_dir)]
        devices = ", ".join(sorted({engine["device"] for engine in engines}))
        described = describe_server(list(contracts.values()), facts, model, devices)
        yield Target(server.grpc_url, contracts, server.metrics_url, server.process_ids), described


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


def _measure(comparison: Comparison) -> tuple[Path | None, OSError | None]:
    """Run a comparison and write its pages: the report, or why not all could be written; it is shown all the same."""
    try:
        comparison.run()
        return _write_pages(comparison), None
    except OSError as error:
        return None, error


def _write_pages(comparison: Comparison) -> Path:
    # matplotlib takes a second to import; every other command does without it.
    from slipstream_client.report.charts import write_charts
    from slipstream_client.report.page import write_report

    lines = comparison.request_lines()
    write_charts(comparison.results, lines, comparison.out)
    return write_report(comparison.results, lines, comparison.out)


def _show(comparison: Comparison, report: Path | None, as_json: bool, notes: Console) -> None:
    results = comparison.results
    if as_json:
        print(json.dumps(results, indent=1))
    else:
        console = Console()
        # Piped output has no width of its own; the tables need this much.
        console = console if console.is_terminal else Console(width=132)
        for table in compare_tables(results, comparison.request_lines(), console.width):
            console.print(table)
        for doubt in filter(None, map(batching_doubt, results["runs"])):
            console.print(doubt, highlight=False, markup=False)
        console.print(_quality_text(results["quality"]), highlight=False)
    mismatches = comparison.input_mismatches()
    if mismatches:
        notes.print(f"{len(mismatches)} prompts had another number of tokens than meant, first {mismatches[0]}")
    errors = dict.fromkeys(record.error for record in comparison.records if record.error)
    for error in list(errors)[:5]:
        notes.print(f"failed: {error}", markup=False)
    if results["interrupted"]:
        notes.print("interrupted: the results hold the runs that were complete")
    if report is not None:
        (notes if as_json else Console()).print(f"report: {report}", highlight=False, soft_wrap=True, markup=False)


def _quality_text(quality: dict[str, Any]) -> str:
    if not quality["compared"]:
        return "answers: nothing to compare"
    if not quality["different"]:
        return f"answers: equal in all {quality['compared']} comparisons"
    differences = (
        f"  {each['request']} differs from {each['reference']} at output token {each['first_difference']}"
        for each in quality["different"][:_DIFFERENCES_SHOWN]
    )
    return "\n".join([f"answers: {len(quality['different'])} of {quality['compared']} differ", *differences])
