"""trace.json in Chrome's trace event format, which Perfetto opens: one process a run, its steps and its requests.

The format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream_client.report.phases import WORDS, phases
from slipstream_client.report.study import Run, Study

_ROWS = (
    *("prefill_rows", "decode_rows", "recomputed_rows", "prompt_padding_rows", "finished_rows", "sampled_rows"),
    *("left", "preemptions", "kv_tokens_held"),
)
_PIECES = ("schedule", "run", "update")
_ENGINE_THREAD = 1


def write_trace(study: Study, path: Path) -> Path:
    """Write it and return its path; times are microseconds from the start of each run."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, event in enumerate(trace_events(study)):
            file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")
    return path


def trace_events(study: Study) -> Iterator[dict[str, Any]]:
    """All events, run by run."""
    for process, run in enumerate(study.runs, start=1):
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": run["id"]}}
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": process,
            "tid": _ENGINE_THREAD,
            "args": {"name": "engine steps"},
        }
        yield from _steps(study, run, process)
        yield from _requests(study, run, process)


def _steps(study: Study, run: Run, process: int) -> Iterator[dict[str, Any]]:
    shown: dict[str, dict[str, int]] = {}
    for step in study.steps(run):
        at = _us(step["start_s"])
        times = {f"{piece}_ms": round(step[f"{piece}_s"] * 1000, 3) for piece in _PIECES}
        whole = _us(sum(step[f"{piece}_s"] for piece in _PIECES))
        rows = {key: step[key] for key in _ROWS}
        slice_ = {"ph": "X", "name": "step", "ts": at, "dur": whole, "pid": process, "tid": _ENGINE_THREAD}
        yield slice_ | {"args": {"index": step["index"]} | rows | times}
        counters = {
            "requests": {"running": step["running"], "waiting": step["waiting"]},
            "KV blocks": {"used": step["kv_blocks_used"]},
        }
        for name, values in counters.items():
            if shown.get(name) != values:
                shown[name] = values
                yield {"ph": "C", "name": name, "ts": at, "pid": process, "args": values}


def _requests(study: Study, run: Run, process: int) -> Iterator[dict[str, Any]]:
    for record in study.records(run):
        pieces = phases(record, run)
        if not pieces:
            continue
        same = {"cat": "request", "id": record["id"], "pid": process, "tid": 0}
        known = {
            key: record[key] for key in ("phase", "input_tokens", "output_tokens", "finish_reason", "error", "retries")
        }
        name = f"request {record['index']}"
        yield {"ph": "b", "name": name, "ts": _us(pieces[0].start), "args": known} | same
        for piece in pieces:
            yield {"ph": "b", "name": WORDS[piece.kind], "ts": _us(piece.start)} | same
            yield {"ph": "e", "name": WORDS[piece.kind], "ts": _us(piece.end)} | same
        yield {"ph": "e", "name": name, "ts": _us(pieces[-1].end)} | same


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
