"""`slipstream doctor`: what is installed, what would run on which device, what is missing and what mends it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

_MARKS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "missing": ("missing", "red")}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")] = False) -> None:
    """Look at everything that `serve` needs; exit with 1 if it could not work here."""
    # Here, since it looks at much that the other commands do not need.
    from slipstream_client.server.diagnosis import diagnose

    findings = list(diagnose())
    works = all(finding.status != "missing" for finding in findings)
    if as_json:
        print(json.dumps({"serve_works": works, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        console = Console(highlight=False)
        table = Table("", "", "found", box=None, pad_edge=False)
        for finding in findings:
            mark, colour = _MARKS[finding.status]
            table.add_row(Text(mark, style=colour), Text(finding.topic), Text(finding.found, overflow="fold"))
        console.print(table)
        console.print()
        for finding in findings:
            if finding.mend:
                # Not wrapped, so that it can be pasted.
                console.print(f"{finding.topic}: {finding.mend}", markup=False, soft_wrap=True)
        console.print("`slipstream serve` can run here." if works else "`slipstream serve` cannot run here yet.")
    if not works:
        raise typer.Exit(1)
