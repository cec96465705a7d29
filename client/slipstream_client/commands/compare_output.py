"""What `slipstream compare` leaves behind when it has measured: pages in its folder, tables on the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from slipstream_client.comparison.comparison import Comparison
from slipstream_client.report.batching import batching_doubt
from slipstream_client.report.changes import Change, changes_table
from slipstream_client.report.compare_table import compare_tables
from slipstream_client.report.study import Study

_DIFFERENCES_SHOWN = 10


def write_pages(study: Study, out: Path, changes: Sequence[Change] | None) -> tuple[Path | None, OSError | None]:
    """Write the report and the files beside it into `out`: its path, or why not all could be written."""
    # matplotlib takes a second to import; every other command does without.
    from slipstream_client.report.files import write_all

    try:
        pages = write_all(study, out, changes)
    except OSError as error:
        return None, error
    return pages[0], None


def show(
    comparison: Comparison,
    study: Study,
    changes: Sequence[Change] | None,
    report: Path | None,
    as_json: bool,
    notes: Console,
) -> None:
    """Print the tables, or with `as_json` the results, and what must not be overlooked."""
    results = comparison.results
    if as_json:
        print(json.dumps(results, indent=1))
    else:
        console = Console()
        # Piped output has no width of its own; the tables need this much.
        console = console if console.is_terminal else Console(width=160)
        for table in compare_tables(study, console.width):
            console.print(table)
        for doubt in filter(None, map(batching_doubt, study.all_cells())):
            console.print(doubt, highlight=False, markup=False)
        if changes is not None:
            console.print(changes_table(changes))
        console.print(_quality_text(results["quality"]), highlight=False, markup=False)
    mismatches = comparison.input_mismatches()
    if mismatches:
        notes.print(
            f"{len(mismatches)} prompts had another number of tokens than meant, first {mismatches[0]}", markup=False
        )
    errors = dict.fromkeys(record.error for record in comparison.records if record.error)
    for error in list(errors)[:5]:
        notes.print(f"failed: {error}", markup=False)
    if results["interrupted"]:
        held = "the results hold the runs that were complete" if results["runs"] else "no run was complete"
        notes.print(f"interrupted: {held}")
    if report is not None:
        (notes if as_json else Console()).print(f"report: {report}", highlight=False, soft_wrap=True, markup=False)


def _quality_text(quality: dict[str, Any]) -> str:
    lines = [_equality_text(quality)]
    for name, seen in quality["agreement"].items():
        lines.append(f"answers of {name}: {seen['agree']} of {seen['compared']} are those of the native executor")
    return "\n".join(lines)


def _equality_text(quality: dict[str, Any]) -> str:
    if not quality["compared"]:
        return "answers: nothing to compare"
    if not quality["different"]:
        return f"answers: equal in all {quality['compared']} comparisons"
    differences = (
        f"  {each['request']} differs from {each['reference']} at output token {each['first_difference']}"
        for each in quality["different"][:_DIFFERENCES_SHOWN]
    )
    return "\n".join([f"answers: {len(quality['different'])} of {quality['compared']} differ", *differences])
