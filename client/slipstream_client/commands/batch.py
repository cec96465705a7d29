"""`slipstream batch`: a file of requests in, a file of answers out; interrupted it goes on where it was."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slipstream_client.aio import AsyncSlipstreamClient
from slipstream_client.comparison.server_facts import read_contracts
from slipstream_client.errors import SlipstreamError
from slipstream_client.interruption import ended_as_by_ctrl_c
from slipstream_client.offline.input_file import BadInput, InputFile
from slipstream_client.offline.job import BatchJob
from slipstream_client.offline.lines import BatchRequest
from slipstream_client.offline.output_file import OutputFile, RequestLog
from slipstream_client.offline.progress import BatchProgress
from slipstream_client.offline.runner import Attempt, BatchOptions, BatchRunner, Outcome

_INTERRUPTED = 130
_FAILURES_SHOWN = 5


def batch(
    requests: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="One request a line.", show_default=False)],
    answers: Annotated[
        Path, typer.Argument(metavar="OUT.jsonl", help="One answer a line, in order of completion.", show_default=False)
    ],
    batcher: Annotated[str, typer.Option(help="The model to ask.")] = "continuous",
    url: Annotated[
        str | None, typer.Option(help="gRPC endpoint of a running server; without it one is started.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Requests in flight.")] = 32,
    retries: Annotated[
        int, typer.Option(min=0, help="Further attempts where the server was full, gone or too slow; up to 30 s apart.")
    ] = 10,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=86400, help="Seconds after which an attempt has failed.")
    ] = 600.0,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an answer, where its line does not say.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="File with a line for each attempt.", show_default="OUT.log.jsonl")
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Send again what has failed for good before.")
    ] = False,
    model: Annotated[str | None, typer.Option(help="Language model of the server that is started.")] = None,
    device: Annotated[str | None, typer.Option(help="Its device: auto, cpu or cuda.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")] = False,
) -> None:
    """Answer every request of a file. Started again after an interruption, it sends what has no answer yet.

    A line is {"id", "prompt" or "messages" or "input_ids", sampling parameters} or one of OpenAI's batch files.

    Exits with 1 if a request has failed.
    """
    if url is not None and (model is not None or device is not None):
        raise SlipstreamError("--model and --device are the server's: they cannot be changed with --url")
    if not answers.name:
        raise SlipstreamError(f"{answers} is no file")
    log = log or _beside(answers, ".log.jsonl")
    _require_different_files(requests, answers, log)
    notes = Console(stderr=True)
    source = _checked(requests, max_tokens, notes)
    with contextlib.closing(OutputFile(answers)) as output, contextlib.closing(RequestLog(log)) as attempts:
        job = BatchJob(source, output, attempts, retry_failed)
        progress = BatchProgress(notes, len(source.digests), len(job.kept))
        progress.say(f"{len(source.digests)} requests, {len(job.kept)} of them ended before; log: {log}")
        interrupted = False
        if job.left:
            options = BatchOptions(concurrency, retries)
            try:
                with ended_as_by_ctrl_c(), _server(url, batcher, model, device, answers, progress) as (where, check):
                    contracts, _ = read_contracts(where, [batcher])
                    job.begin(contracts[batcher])
                    make_client = partial(AsyncSlipstreamClient, where, batcher, timeout_s=timeout)
                    with progress:
                        interrupted = asyncio.run(_send(job, make_client, options, progress, check))
            except KeyboardInterrupt:
                interrupted = True
    _show(job, progress, notes, answers, as_json)
    if interrupted:
        progress.say("interrupted: the same command goes on from here")
        raise typer.Exit(_INTERRUPTED)
    if job.failures:
        raise typer.Exit(1)


def _checked(path: Path, max_tokens: int | None, notes: Console) -> InputFile:
    try:
        return InputFile.checked(path, max_tokens)
    except BadInput as error:
        for fault in error.faults:
            notes.print(fault, highlight=False, markup=False, soft_wrap=True)
        raise


def _beside(answers: Path, ending: str) -> Path:
    """The file of that ending which belongs to these answers and to no others."""
    return answers.with_name(answers.name.removesuffix(".jsonl") + ending)


def _require_different_files(*paths: Path) -> None:
    resolved = [path.resolve() for path in paths]
    if len(set(resolved)) < len(resolved):
        raise SlipstreamError("requests, answers and log need three different files")


@contextlib.contextmanager
def _server(
    url: str | None, batcher: str, model: str | None, device: str | None, answers: Path, progress: BatchProgress
) -> Iterator[tuple[str, Callable[[], None]]]:
    """The server to ask, started here unless `url` names one, and what raises once there is none any more."""
    if url is not None:
        yield url, lambda: None
        return
    # The server is imported where it is needed: a batch with --url does without it.
    from slipstream_client.server.tritonserver import TritonServer

    progress.say(f"starting a server with {batcher}")
    with TritonServer(
        models=[batcher],
        model=model,
        device=device,
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        log_path=_beside(answers, ".tritonserver.log"),
    ) as server:
        yield server.grpc_url, server.require_running


async def _send(
    job: BatchJob,
    make_client: Callable[[], AsyncSlipstreamClient],
    options: BatchOptions,
    progress: BatchProgress,
    check_server: Callable[[], None],
) -> bool:
    """Send what is left; whether a signal has ended it before."""

    def note_attempt(attempt: Attempt) -> None:
        job.note_attempt(attempt)
        progress.attempt_ended(attempt)

    def keep(request: BatchRequest, outcome: Outcome) -> None:
        job.keep(request, outcome)
        progress.request_ended(outcome)

    async with make_client() as client:  # it belongs to the loop that it is made in
        runner = BatchRunner(client, options, note_attempt, keep, check_server)
        task = asyncio.ensure_future(runner.run(job.source.requests_without(job.kept)))
        with _cancelled_by_signals(task):
            try:
                await task
            except asyncio.CancelledError:
                return True
    return False


@contextlib.contextmanager
def _cancelled_by_signals(task: asyncio.Future[None]) -> Iterator[None]:
    """Let a signal cancel the task between two of its steps, so that no line is half done when it comes."""
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    previous = {number: signal.getsignal(number) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}
    for number in previous:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number, handler in previous.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def _show(job: BatchJob, progress: BatchProgress, notes: Console, answers: Path, as_json: bool) -> None:
    for text in job.texts[:_FAILURES_SHOWN]:
        notes.print(f"failed: {text}", highlight=False, markup=False, soft_wrap=True)
    rate = progress.tokens / progress.seconds if progress.tokens else 0.0
    summary = {
        "requests": len(job.source.digests),
        "answered": progress.answered,
        "answered_before": len(job.kept),
        "failed": len(job.failures),
        "left": len(job.source.digests) - progress.ended,
        "retries": progress.retried,
        "seconds": round(progress.seconds, 3),
        "output_tokens": progress.tokens,
        "output_tokens_per_s": round(rate, 3),
    }
    if as_json:
        print(json.dumps(summary))
        return
    counts = f"{progress.answered} answered, {len(job.failures)} failed, {len(job.kept)} ended before"
    speed = f"{progress.tokens} tokens in {progress.seconds:.1f} s ({rate:.1f} tokens/s), {progress.retried} retries"
    print(f"{counts}, {summary['left']} left; {speed}: {answers}")
