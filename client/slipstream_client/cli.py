"""The console command `slipstream`: one file in `commands/` for each of its verbs."""

from __future__ import annotations

import importlib
import io
import sys

import typer

from slipstream_client.errors import SlipstreamError

_COMMANDS = ("serve", "generate", "compare", "report", "top", "batch", "health", "doctor", "model")


def make_app(arguments: list[str]) -> typer.Typer:
    """The command that is asked for, whose module alone is imported; all of them for anything else, such as help."""
    app = typer.Typer(
        name="slipstream",
        help="Continuous batching on NVIDIA Triton, and what it buys over the other batchers.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
    )
    app.callback()(lambda: None)  # typer drops the name of an only command without one
    for name in [name for name in _COMMANDS if arguments[:1] == [name]] or _COMMANDS:
        module = importlib.import_module(f"slipstream_client.commands.{name}")
        if name == "model":
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(getattr(module, name))
    return app


def main() -> None:
    """Run the command line; an expected failure, or one of the system's, is one line on standard error, exit code 1."""
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="replace")  # an answer may hold what a terminal cannot show
    try:
        make_app(sys.argv[1:])()
    except (SlipstreamError, OSError) as error:
        print(f"slipstream: {error}", file=sys.stderr)
        sys.exit(1)
