"""Arrival times from a trace file, to be replayed."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from slipstream_client.errors import SlipstreamError
from slipstream_client.load.arrivals import Replay
from slipstream_client.load.datasets import arrival, decoded, json_objects, read_file
from slipstream_client.load.timestamps import TIME_FIELDS, seconds


def read_replay(name: str, speed: float = 1.0, max_concurrency: int | None = None) -> Replay:
    """The arrivals in a file, in order and from time zero.

    A .jsonl file has a `timestamp` or `arrival` in every line; a .csv file a column of that name (such as TIMESTAMP in
    Azure's traces), or a single column without a header. All are seconds or dates with time of day; a trace in
    milliseconds (Mooncake's) is replayed with speed 1000.

    Raises:
        SlipstreamError: it cannot be read, or something in it is wrong.
    """
    path = Path(name).expanduser()
    readers = {".jsonl": _of_json_lines, ".csv": _of_csv}
    if path.suffix not in readers:
        raise SlipstreamError(f"{path.name}: a trace is a .jsonl or .csv file")
    times = sorted(readers[path.suffix](path.name, decoded(path.name, read_file(path))))
    if not times:
        raise SlipstreamError(f"{path.name} has no arrivals")
    return Replay(tuple(round(time - times[0], 6) for time in times), speed, max_concurrency, path.name)


def _of_json_lines(name: str, content: str) -> Iterator[float]:
    for place, line in json_objects(name, content):
        time = arrival(place, line)
        if time is None:
            raise SlipstreamError(f"{place} has neither timestamp nor arrival")
        yield time


def _of_csv(name: str, content: str) -> Iterator[float]:
    rows = csv.reader(content.splitlines())
    column = None
    for row in _whole_rows(name, rows):
        if not row:
            continue
        place = f"{name} line {rows.line_num}"
        if column is None:
            headers = [cell.strip().lower() for cell in row]
            column = next((headers.index(field) for field in TIME_FIELDS if field in headers), None)
            if column is not None:
                continue
            if len(row) > 1:
                raise SlipstreamError(f"{place}: no column timestamp or arrival in {', '.join(row)}")
            column = 0
        if len(row) <= column:
            raise SlipstreamError(f"{place}: no column {column + 1}")
        yield seconds(place, TIME_FIELDS[0], row[column])


def _whole_rows(name: str, rows: Iterator[list[str]]) -> Iterator[list[str]]:
    try:
        yield from rows
    except csv.Error as error:
        raise SlipstreamError(f"{name} is no CSV: {error}") from error
