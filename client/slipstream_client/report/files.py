"""All that a person reads of a comparison, as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slipstream_client.report.changes import Change
from slipstream_client.report.charts import write_charts
from slipstream_client.report.csv_file import write_requests_csv
from slipstream_client.report.page import write_report
from slipstream_client.report.study import Study
from slipstream_client.report.trace import write_trace


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
