"""`slipstream serve`: run a Triton server with Slipstream's models until it is told to end."""

from __future__ import annotations

import json
import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from slipstream_client.commands.model import errors_of_the_store, pull
from slipstream_client.errors import SlipstreamError
from slipstream_client.server.paths import cache_folder
from slipstream_client.server.ports import is_free

if TYPE_CHECKING:
    from slipstream_client.server.tritonserver import TritonServer

_WATCH_S = 1.0
_SAMPLE = {"text_input": "The capital of France is", "max_tokens": 32, "temperature": 0}


def serve(
    models: Annotated[
        str | None,
        typer.Option(help="Models of the repository to load, separated by commas; else all that serve requests."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            envvar="SLIPSTREAM_MODEL",
            help="Language model: a built-in name, a folder, a .gguf file or a hub id; else what config.pbtxt says.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(envvar="SLIPSTREAM_DEVICE", help="auto, cpu or cuda.", show_default="as each model is configured"),
    ] = None,
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of HTTP; 0 picks a free one.")] = 8000,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of gRPC; 0 picks a free one.")] = 8001,
    metrics_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of metrics; 0 picks a free one.")] = 8002,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 opens the server to the network.")] = (
        "127.0.0.1"
    ),
    repository: Annotated[Path | None, typer.Option(help="Triton model repository; else this checkout's.")] = None,
    log: Annotated[Path | None, typer.Option(help="File to which the server's log is appended.")] = None,
    drain_seconds: Annotated[float, typer.Option(min=0, help="How long running requests may take at the end.")] = 20.0,
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds until all models must be ready.")] = 300.0,
    admin: Annotated[
        bool, typer.Option("--admin", help="Load the model `admin` too, which tells of the engines' steps.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line for a program.")] = False,
) -> None:
    """Start a Triton server, wait until its models are ready, and serve until Ctrl-C or SIGTERM.

    The first signal lets running requests finish, the second ends everything at once.
    """
    # Here, since the other commands need none of it.
    from slipstream_client.server.tritonserver import TritonServer

    if device not in (None, "auto", "cpu", "cuda"):
        raise SlipstreamError(f"--device is {device!r}; allowed are auto, cpu, cuda")
    names = None if models is None else [name.strip() for name in models.split(",") if name.strip()]
    server = TritonServer(
        names,
        model,
        device,
        http_port,
        grpc_port,
        metrics_port,
        log_path=log or _default_log(http_port, host),
        repository=repository,
        host=host,
        start_timeout_s=start_timeout,
        admin=admin,
    )
    output = _Output(as_json)
    _pull_missing_models(server, model, as_json)
    signals = _Signals()
    with signals.handled():
        _start(server, output)
        signals.started = True
        output.ready(server)
        _watch(server, signals, output)
        _end(server, signals, output, drain_seconds)


class _Output:
    """What the user, or with --json a program, is told: on standard output, one event at a time."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console(highlight=False, soft_wrap=True)

    def event(self, name: str, text: str, **details: Any) -> None:
        if self.as_json:
            print(json.dumps({"event": name, **details}), flush=True)
        else:
            self.console.print(text, markup=False)

    def notice(self, text: str) -> None:
        self.event("notice", text, message=text)

    def ready(self, server: TritonServer) -> None:
        addresses = {"http": server.http_url, "grpc": server.grpc_url, "metrics": f"{server.metrics_url}/metrics"}
        text = [
            f"Ready: {', '.join(server.models)}",
            f"  HTTP     http://{addresses['http']}",
            f"  gRPC     {addresses['grpc']}",
            f"  metrics  http://{addresses['metrics']}",
            f"  log      {server.log_path}",
            f"  engines  {server.runtime_dir}",
            "",
            *_curl_lines(server),
            "Ctrl-C ends the server once its running requests are done.",
        ]
        self.event(
            "ready",
            "\n".join(text),
            models=server.models,
            **addresses,
            log=str(server.log_path),
            runtime_dir=str(server.runtime_dir),
            pid=server.pid,
        )


class _Signals:
    """The first SIGINT, SIGTERM or SIGHUP asks for an orderly end; the second, or one at the start, ends at once."""

    def __init__(self) -> None:
        self.started = False
        self.end = threading.Event()
        self.hurry = threading.Event()

    @contextmanager
    def handled(self) -> Iterator[None]:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup leaves it
            numbers.append(signal.SIGHUP)
        previous = {number: signal.signal(number, self._received) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _received(self, number: int, _frame: FrameType | None) -> None:
        if not self.started:
            raise SystemExit(128 + number)
        (self.hurry if self.end.is_set() else self.end).set()


def _start(server: TritonServer, output: _Output) -> None:
    version = f" {server.installation.version}" if server.installation.version else ""
    what = f"Starting tritonserver{version} from {server.installation.source} with {', '.join(server.models)}"
    if output.as_json or not output.console.is_terminal:
        output.event("starting", what, models=server.models)
        server.start()
    else:
        with output.console.status(what):
            server.start()


def _watch(server: TritonServer, signals: _Signals, output: _Output) -> None:
    """Return when a signal came; meanwhile mend what can be mended.

    Raises:
        ServerError: the server ended by itself; nothing of it is left.
    """
    from slipstream_client.server.stub_watch import StubWatch

    watch = StubWatch(server, output.notice)
    try:
        while not signals.end.wait(_WATCH_S):
            server.require_running()
            watch.look()
    except BaseException:
        server.kill()
        raise


def _end(server: TritonServer, signals: _Signals, output: _Output, drain_seconds: float) -> None:
    output.event("draining", "draining: no new requests; running ones may finish (Ctrl-C again ends them at once)")
    drained: dict[str, dict[str, Any]] = {}

    def drain_and_stop() -> None:
        if drain_seconds > 0:
            drained.update(server.drain(drain_seconds))
        server.stop(drain_seconds=0)

    worker = threading.Thread(target=drain_and_stop, name="stop", daemon=True)
    worker.start()
    while worker.is_alive() and not signals.hurry.is_set():
        worker.join(0.1)
    if signals.hurry.is_set():
        server.kill()
        output.event("killed", "ended at once, with the requests that were running")
        raise typer.Exit(1)
    engines = {name: {key: answer.get(key, 0) for key in ("finished", "aborted")} for name, answer in drained.items()}
    aborted = sum(engine["aborted"] for engine in engines.values())
    cut = f"; cut short after {drain_seconds:g} s: {aborted} of the running requests" if aborted else ""
    output.event("stopped", f"stopped{cut}", engines=engines)


def _pull_missing_models(server: TritonServer, model: str | None, as_json: bool) -> None:
    """Fetch the built-in model if it is missing; say what mends it if another one is."""
    from slipstream_client.server.model_repository import language_models

    try:
        from slipstream.errors import ModelNotFound
        from slipstream.models import store
    except ImportError:  # the models themselves will say that they cannot be loaded
        return
    for name in [model] if model else language_models(server.repository, server.models):
        with errors_of_the_store():
            try:
                store.resolve(name)
            except ModelNotFound:
                if name not in store.BUILT_IN:
                    raise
                pull(name, as_json=as_json)


def _default_log(http_port: int, host: str) -> Path | None:
    """A log of this start only, in the folder of things that may be deleted; None where no port names it."""
    if http_port == 0:
        return None
    log = cache_folder() / "logs" / f"serve-{http_port}.log"
    if is_free(http_port, host):  # otherwise it is the log of another server, which runs
        log.unlink(missing_ok=True)
    return log


def _curl_lines(server: TritonServer) -> list[str]:
    """Commands to paste that ask one of the loaded models; none for models that are not ours."""
    base = f"http://{server.http_url}/v2/models"
    if "continuous" in server.models:
        return [
            f"curl -s {base}/continuous/generate -d {_quoted(_SAMPLE)}",
            f"curl -sN {base}/continuous/generate_stream -d {_quoted({**_SAMPLE, 'stream': True})}",
            "",
        ]
    if "continuous_unary" in server.models:
        return [f"curl -s {base}/continuous_unary/generate -d {_quoted(_SAMPLE)}", ""]
    parameters = json.dumps({key: value for key, value in _SAMPLE.items() if key != "text_input"})
    body = {"text_input": _SAMPLE["text_input"], "sampling_parameters": parameters}
    siblings = {"static": ("-s", "generate"), "dynamic": ("-s", "generate"), "iterative": ("-sN", "generate_stream")}
    for name, (flags, verb) in siblings.items():
        if name in server.models:
            return [f"curl {flags} {base}/{name}/{verb} -d {_quoted(body)}", ""]
    return []


def _quoted(body: dict[str, Any]) -> str:
    return shlex.quote(json.dumps(body))
