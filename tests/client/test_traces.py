"""Arrival times as trace files give them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slipstream_client.errors import SlipstreamError
from slipstream_client.load.traces import read_replay


def trace(folder: Path, name: str, *lines: str) -> str:
    path = folder / name
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def test_azures_timestamps_are_read_as_they_are_published(tmp_path: Path) -> None:
    name = trace(
        tmp_path,
        "azure.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 23:59:59.6805900,374,44",
        "2023-11-17 00:00:01.6805901,396,109",
        "2023-11-17 00:01:00,879,55",
    )
    load = read_replay(name, speed=4, max_concurrency=8)
    assert load.times == (0.0, 2.0, 60.31941)
    assert (load.speed, load.max_concurrency, load.file, load.label) == (4, 8, "azure.csv", "trace-x4")


def test_times_are_sorted_and_begin_at_zero(tmp_path: Path) -> None:
    assert read_replay(trace(tmp_path, "a.csv", "12.5", "10", "", "10.25")).times == (0.0, 0.25, 2.5)
    lines = ('{"timestamp": 7, "input_tokens": 5}', "", '{"arrival": "6.5"}', '{"arrival": "1970-01-01T00:00:08Z"}')
    assert read_replay(trace(tmp_path, "a.jsonl", *lines)).times == (0.0, 0.5, 1.5)


def test_a_column_is_found_by_its_name(tmp_path: Path) -> None:
    name = trace(tmp_path, "burst.csv", 'Model,"Request tokens",Timestamp', "ChatGPT,472,5", "ChatGPT,1087,45")
    assert read_replay(name).times == (0.0, 40.0)
    assert read_replay(trace(tmp_path, "one.csv", "arrival", "3")).times == (0.0,)


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("t.txt", ("1",), "t.txt: a trace is a .jsonl or .csv file"),
        ("t.csv", (), "t.csv has no arrivals"),
        ("t.csv", ("timestamp",), "t.csv has no arrivals"),
        ("t.csv", ("start,end", "1,2"), "t.csv line 1: no column timestamp or arrival in start, end"),
        ("t.csv", ("when", "1"), "t.csv line 1: timestamp is 'when'; allowed: seconds from 0, or a date and time"),
        ("t.csv", ("model,timestamp", "a,1", "a"), "t.csv line 3: no column 2"),
        ("t.csv", ("1", "-2"), "t.csv line 2: timestamp is '-2'; allowed: seconds from 0"),
        ("t.csv", ("1", "inf"), "t.csv line 2: timestamp is 'inf'"),
        ("t.csv", ("1", "2023-13-01 00:00:00"), "t.csv line 2: timestamp is '2023-13-01 00:00:00'"),
        ("t.csv", ("1", "2023-11-01 00:00:00+01:00"), "t.csv line 2: timestamp is '2023-11-01 00:00:00+01:00'"),
        ("t.csv", ("1", "2" * 131073), "t.csv is no CSV: field larger than field limit (131072)"),
        ("t.jsonl", ('{"arrival": 1' + "0" * 400 + "}",), "t.jsonl line 1: arrival is 1000"),
        ("t.jsonl", ('{"arrival": 1}', '{"prompt": "a"}'), "t.jsonl line 2 has neither timestamp nor arrival"),
        ("t.jsonl", ('{"arrival": true}',), "t.jsonl line 1: arrival is True; allowed: seconds from 0"),
    ],
)
def test_a_bad_trace_is_named(tmp_path: Path, name: str, lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(SlipstreamError, match=re.escape(message)):
        read_replay(trace(tmp_path, name, *lines))


def test_a_trace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"cannot read .*none\.csv: No such file"):
        read_replay(str(tmp_path / "none.csv"))
