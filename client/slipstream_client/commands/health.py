"""`slipstream health`: a probe that also sees what Triton's own readiness does not, such as a dead engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from slipstream_client import control
from slipstream_client.metrics_text import parse_samples
from slipstream_client.server.triton_http import TritonHttp, TritonRefused, TritonUnreachable


@dataclass(frozen=True)
class Check:
    name: str
    ok: bool
    detail: str


def health(
    url: Annotated[str, typer.Option(help="Host and port of the server's HTTP.")] = "127.0.0.1:8000",
    metrics_port: Annotated[int, typer.Option(help="Port of the server's metrics.")] = 8002,
    model: Annotated[
        list[str] | None, typer.Option(help="A model that must be ready; may be repeated. Else all that are loaded.")
    ] = None,
    runtime_dir: Annotated[
        Path | None, typer.Option(help="The server's runtime directory, to ask the engines themselves as well.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, max=86400, help="Seconds to wait for each answer.")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")] = False,
) -> None:
    """Exit with 0 only if the server is ready, the models are ready and every engine is up."""
    server = TritonHttp(url, timeout)
    metrics = TritonHttp(f"{server.url.rpartition(':')[0] or server.url}:{metrics_port}", timeout)
    checks = [*_server_checks(server), *_model_checks(server, model), *_engine_checks(metrics)]
    if runtime_dir is not None:
        checks += _socket_checks(runtime_dir, timeout)
    healthy = all(check.ok for check in checks)
    if as_json:
        print(json.dumps({"healthy": healthy, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        for check in checks:
            print(f"{'ok  ' if check.ok else 'FAIL'}  {check.name}: {check.detail}")
    if not healthy:
        raise typer.Exit(1)


def _server_checks(server: TritonHttp) -> Iterator[Check]:
    try:
        live, ready = server.is_live(), server.is_ready()
    except TritonUnreachable as error:
        yield Check("server", False, str(error))
        return
    yield Check("server live", live, server.url)
    yield Check("server ready", ready, server.url)


def _model_checks(server: TritonHttp, names: list[str] | None) -> Iterator[Check]:
    try:
        states = server.model_states()
    except TritonUnreachable:  # said by the server's own checks
        return
    except TritonRefused as error:
        yield Check("models", False, str(error))
        return
    loaded = [name for name, state in states.items() if state]
    if not names and not loaded:
        yield Check("models", False, "none is loaded")
    for name in names or loaded:
        state = states.get(name)
        ready = state == "READY" and server.is_model_ready(name)
        yield Check(f"model {name}", ready, state or ("not loaded" if state == "" else "not in the repository"))


def _engine_checks(metrics: TritonHttp) -> Iterator[Check]:
    try:
        page = metrics.metrics()
    except (TritonUnreachable, TritonRefused) as error:
        yield Check("metrics", False, str(error))
        return
    engines = list(parse_samples(page, "slipstream_engine_up"))
    if not engines:
        yield Check("engines", False, f"{metrics.url} reports no slipstream_engine_up")
    for engine in engines:
        up = engine.value == 1
        yield Check(f"engine {engine.labels.get('model', '?')}", up, "up" if up else "down")


def _socket_checks(runtime_dir: Path, timeout_s: float) -> Iterator[Check]:
    paths = control.list_engines(runtime_dir)
    if not paths:
        yield Check("control sockets", False, f"none in {runtime_dir}")
    for path in paths:
        try:
            status = control.request(path, {"type": "status"}, timeout_s)
        except control.EngineUnreachable as error:
            yield Check(f"control {path.stem}", False, str(error))
            continue
        state = str(status.get("state"))
        counts = f"{status.get('running', '?')} running, {status.get('waiting', '?')} waiting"
        yield Check(f"control {path.stem}", state == "ready", f"{state}, {counts}, process {status.get('pid', '?')}")
