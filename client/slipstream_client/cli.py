"""The console command `slipstream`: one file in `commands/` for each of its verbs."""

from __future__ import annotations

import io
import sys

import typer

from slipstream_client.commands import batch, compare, doctor, generate, health, model, report, serve, top
from slipstream_client.errors import SlipstreamError

app = typer.Typer(
    name="slipstream",
    help="Continuous batching on NVIDIA Triton, and what it buys over the other batchers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("serve")(serve.serve)
app.command("generate")(generate.generate)
app.command("compare")(compare.compare)
app.command("report")(report.report)
app.command("batch")(batch.batch)
app.command("top")(top.top)
app.command("health")(health.health)
app.command("doctor")(doctor.doctor)
app.add_typer(model.app, name="model")


def main() -> None:
    """Run the command line; an expected failure, or one of the system's, is one line on standard error, exit code 1."""
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="replace")  # an answer may hold what a terminal cannot show
    try:
        app()
    except (SlipstreamError, OSError) as error:
        print(f"slipstream: {error}", file=sys.stderr)
        sys.exit(1)
