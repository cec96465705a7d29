"""`slipstream report`: the pages of a comparison, written again from its files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slipstream_client.errors import SlipstreamError


def report(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a comparison: results.json, requests.jsonl and, if any, steps.jsonl.")
    ],
    baseline: Annotated[
        Path | None, typer.Option(help="Folder of an earlier comparison, to show what has changed since.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the pages.", show_default="the same")] = None,
) -> None:
    """Write report.html, the charts, requests.csv and trace.json from the files of a comparison."""
    # matplotlib takes a second to import; every other command does without it.
    from slipstream_client.report.changes import baseline_changes, changes_table
    from slipstream_client.report.files import write_all
    from slipstream_client.report.folder import of_a_comparison, read_earlier, read_folder
    from slipstream_client.report.study import Study

    files = read_folder(folder)
    earlier = read_earlier(baseline) if baseline else None
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    with of_a_comparison(folder):
        study = Study(*files)
        changes = None if earlier is None else baseline_changes(study.results, earlier)
        try:
            paths = write_all(study, out or folder, changes)
        except OSError as error:
            raise SlipstreamError(f"cannot write to {out or folder}: {error.strerror}") from error
    if changes is not None:
        console.print(changes_table(changes))
    for path in paths:
        console.print(path, highlight=False, soft_wrap=True, markup=False)
