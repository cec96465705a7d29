"""All that a person reads of a comparison, as files: from the results and records, or from a folder that holds them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slipstream_client.errors import SlipstreamError
from slipstream_client.report.changes import Change
from slipstream_client.report.charts import write_charts
from slipstream_client.report.csv_file import write_requests_csv
from slipstream_client.report.page import write_report
from slipstream_client.report.study import Study
from slipstream_client.report.trace import write_trace

VERSION = 2


def write_all(study: Study, out: Path, changes: Sequence[Change] | None = None) -> list[Path]:
    """Write report.html, the PNG charts, requests.csv and trace.json into `out` (created if need be).

    Returns their paths, the page first. `changes` are those against an earlier run, where there is one to show.
    """
    out.mkdir(parents=True, exist_ok=True)
    return [
        write_report(study, out, changes),
        *write_charts(study, out),
        write_requests_csv(study, out / "requests.csv"),
        write_trace(study, out / "trace.json"),
    ]


def read_folder(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """results, requests and steps of a comparison; no steps where none were read.

    Raises:
        SlipstreamError: the folder holds no results, of another version, or a file that cannot be read.
    """
    results = read_results(folder)
    return results, _lines(folder / "requests.jsonl"), _lines(folder / "steps.jsonl")


def read_results(folder: Path) -> dict[str, Any]:
    """results.json of a folder.

    Raises:
        SlipstreamError: there is none, it cannot be read, or it is of another version.
    """
    path = folder / "results.json"
    if not path.is_file():
        raise SlipstreamError(f"{folder} holds no results.json: it is not the folder of a comparison")
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SlipstreamError(f"{path} cannot be read: {error}") from error
    version = results.get("version") if isinstance(results, dict) else None
    if version != VERSION:
        raise SlipstreamError(f"{path} is of version {version}; this program reads version {VERSION}")
    return results


def _lines(path: Path) -> list[dict[str, Any]]:
    return list(_read_lines(path)) if path.is_file() else []


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise SlipstreamError(f"{path}, line {number}, cannot be read: {error}") from error
