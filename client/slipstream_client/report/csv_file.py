"""requests.csv: every request on one line, with the figures that follow from its record."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from slipstream_client.report.phases import WORDS, phases, tpot_s
from slipstream_client.report.study import Record, Run, Study

_OF_RUN = ("variant", "workload", "point", "repeat")
_OF_RECORD = (
    *("id", "index", "phase", "intended", "sent", "first", "last", "input_tokens", "output_tokens"),
    *("finish_reason", "error_code", "error", "retries"),
)
_PHASES = tuple(kind for kind in WORDS if kind != "failed")
_COMPUTED = ("ttft_ms", "e2e_ms", "e2e_intended_ms", "tpot_ms", *(f"{kind}_ms" for kind in _PHASES))


def write_requests_csv(study: Study, path: Path) -> Path:
    """Write it and return its path."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, [*_OF_RUN, *_OF_RECORD, *_COMPUTED])
        table.writeheader()
        for run in study.runs:
            for record in study.records(run):
                table.writerow(_row(run, record))
    return path


def _row(run: Run, record: Record) -> dict[str, Any]:
    row = {key: run[key] for key in _OF_RUN} | {key: record[key] for key in _OF_RECORD}
    if record["error"]:
        return row
    first, last = record["first"], record["last"]
    row["e2e_ms"] = _milliseconds(record["sent"], last)
    row["e2e_intended_ms"] = _milliseconds(record["intended"], last)
    if first is not None:
        row["ttft_ms"] = _milliseconds(record["sent"], first)
        per_token_s = tpot_s(record)
        if per_token_s is not None:
            row["tpot_ms"] = round(per_token_s * 1000, 3)
    for kind in _PHASES:
        row[f"{kind}_ms"] = round(sum(p.seconds for p in phases(record, run) if p.kind == kind) * 1000, 3)
    return row


def _milliseconds(start: float, end: float) -> float:
    return round((end - start) * 1000, 3)
