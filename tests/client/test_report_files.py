"""The files of a report: all are written, again from a folder, and those for other programs hold what they must."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from simulated_comparison import Data, comparison, fail, runs_of
from slipstream_client import cli
from slipstream_client.comparison.request_figures import tpot_ms
from slipstream_client.errors import SlipstreamError
from slipstream_client.load.records import RequestRecord
from slipstream_client.report.csv_file import write_requests_csv
from slipstream_client.report.files import write_all
from slipstream_client.report.folder import read_folder
from slipstream_client.report.study import Study
from slipstream_client.report.trace import write_trace

NAMES = ["report.html", "throughput.png", "latency_p99.png", "explain.png", "requests.csv", "trace.json"]


def small() -> Data:
    return comparison(("dynamic", "continuous"), ("c4",), count=6)


def write_folder(folder: Path, data: Data) -> None:
    """As a comparison leaves it."""
    folder.mkdir()
    results, requests, steps = data
    (folder / "results.json").write_text(json.dumps(results))
    for name, lines in (("requests", requests), ("steps", steps)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_everything_is_written_and_again_from_the_folder(tmp_path: Path) -> None:
    data = small()
    folder = tmp_path / "one"
    write_folder(folder, data)
    paths = write_all(Study(*data), folder)
    assert [path.name for path in paths] == NAMES
    first = [path.read_bytes() for path in paths]
    for path in paths:
        path.unlink()
    result = CliRunner().invoke(cli.make_app([]), ["report", str(folder)])
    assert result.exit_code == 0, result.output
    assert result.output.split() == [str(path) for path in paths]
    assert [path.read_bytes() for path in paths] == first


def test_the_command_shows_the_change_and_can_write_elsewhere(tmp_path: Path) -> None:
    data = small()
    write_folder(tmp_path / "now", data)
    for run in data[0]["runs"]:
        run["output_tokens_per_s"] /= 2
    write_folder(tmp_path / "then", data)
    arguments = ["report", str(tmp_path / "now"), "--baseline", str(tmp_path / "then"), "--out", str(tmp_path / "new")]
    result = CliRunner().invoke(cli.make_app([]), arguments)
    assert result.exit_code == 0, result.output
    assert "+100.0%" in result.output
    assert "Against the earlier run" in (tmp_path / "new" / "report.html").read_text()
    assert not (tmp_path / "now" / "report.html").exists()


def test_a_folder_without_steps_has_none(tmp_path: Path) -> None:
    write_folder(tmp_path / "one", small())
    (tmp_path / "one" / "steps.jsonl").unlink()
    assert read_folder(tmp_path / "one")[2] == []


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("results.json", None, "holds no results.json"),
        ("results.json", '{"version": 1}', "is of version 1; this program reads version 2"),
        ("results.json", "[]", "is of version None"),
        ("results.json", "{", "cannot be read"),
        ("results.json", "[" * 100_000, "results.json cannot be read: maximum recursion depth exceeded"),
        ("results.json", '{"version": 2}', "does not hold what a comparison writes .KeyError: 'runs'"),
        ("requests.jsonl", '{"a": 1}\n{', "requests.jsonl, line 2, cannot be read"),
        ("requests.jsonl", "null\n", "requests.jsonl, line 1, is no JSON object"),
        ("requests.jsonl", '{"a": 1}\n', "does not hold what a comparison writes .KeyError: 'phase'"),
        ("requests.jsonl", None, "requests.jsonl has 0 of the 6 requests of dynamic/mixed/c4/0"),
        ("steps.jsonl", "\udcff\n", "steps.jsonl, line 1, cannot be read: 'utf-8' codec"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(tmp_path: Path, name: str, content: str | None, words: str) -> None:
    write_folder(tmp_path / "one", small())
    (tmp_path / "one" / name).unlink()
    if content is not None:
        (tmp_path / "one" / name).write_text(content, errors="surrogateescape")
    with pytest.raises(SlipstreamError, match=words):
        read_folder(tmp_path / "one")


def test_damaged_figures_are_said_in_one_line(tmp_path: Path) -> None:
    results, requests, steps = small()
    write_folder(tmp_path / "whole", (results, requests, steps))
    results["runs"][0]["output_tokens_per_s"] = "fast"
    write_folder(tmp_path / "damaged", (results, requests, steps))
    for arguments in (["damaged"], ["whole", "--baseline", "damaged"]):
        folders = [each if each.startswith("--") else str(tmp_path / each) for each in arguments]
        result = CliRunner().invoke(cli.make_app([]), ["report", *folders])
        assert isinstance(result.exception, SlipstreamError)
        assert str(result.exception).startswith(f"{tmp_path / 'damaged'} does not hold what a comparison writes (")


def test_the_csv_has_every_request_with_its_figures(tmp_path: Path) -> None:
    results, requests, steps = small()
    fail(results, requests, runs_of(results, "dynamic", "c4")[:1], 1, "queue is full, try, again")
    path = write_requests_csv(Study(results, requests, steps), tmp_path / "requests.csv")
    rows = list(csv.DictReader(path.open(newline="")))
    assert len(rows) == len(requests) == 4 * 9
    by_id = {row["id"]: row for row in rows}
    for record in requests:
        row = by_id[record["id"]]
        assert "/".join((row["variant"], row["workload"], row["point"], row["repeat"])) == record["run"]
        if record["error"]:
            assert (row["error"], row["error_code"], row["e2e_ms"]) == (record["error"], "UNAVAILABLE", "")
            continue
        assert float(row["e2e_ms"]) == pytest.approx((record["last"] - record["sent"]) * 1000, abs=0.001)
        if record["first"] is None:
            assert (row["ttft_ms"], row["tpot_ms"]) == ("", "")
            assert float(row["held_ms"]) > 0
        else:
            assert float(row["ttft_ms"]) == pytest.approx((record["first"] - record["sent"]) * 1000, abs=0.001)
            decode = (record["last"] - record["first"]) * 1000
            assert float(row["tpot_ms"]) == pytest.approx(decode / (record["output_tokens"] - 1), abs=0.001)
        parts = sum(float(row[f"{kind}_ms"]) for kind in ("client", "waiting", "prefill", "decode", "held", "first"))
        assert parts == pytest.approx(float(row["e2e_intended_ms"]), abs=0.01)


def test_the_csv_and_the_figures_mean_the_same_by_tpot_where_the_first_chunk_has_several_tokens(tmp_path: Path) -> None:
    results, requests, steps = small()
    record = next(each for each in requests if each["first"] is not None and each["output_tokens"] > 3)
    (first, one), (_, two), *later = record["chunks"]
    record["chunks"] = [[first, one + two], *later]
    path = write_requests_csv(Study(results, requests, steps), tmp_path / "requests.csv")
    (row,) = (row for row in csv.DictReader(path.open(newline="")) if row["id"] == record["id"])
    assert float(row["tpot_ms"]) == pytest.approx(tpot_ms(RequestRecord(**record)), abs=0.001)


def test_the_trace_has_one_process_a_run_with_its_steps_and_requests(tmp_path: Path) -> None:
    results, requests, steps = small()
    trace = json.loads(write_trace(Study(results, requests, steps), tmp_path / "trace.json").read_text())
    events: list[dict[str, Any]] = trace["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == sorted(run["id"] for run in results["runs"])
    process = next(pid for pid, name in names.items() if name == "continuous/mixed/c4/1")
    mine = [step for step in steps if step["run"] == "continuous/mixed/c4/1"]
    slices = [event for event in events if event["ph"] == "X" and event["pid"] == process]
    assert len(slices) == len(mine)
    for event, step in zip(slices, mine, strict=True):
        assert event["ts"] == pytest.approx(step["start_s"] * 1e6, abs=0.06)
        length = step["schedule_s"] + step["run_s"] + step["update_s"]
        assert event["dur"] == pytest.approx(length * 1e6, abs=0.06)
        assert event["args"]["decode_rows"] == step["decode_rows"]
        assert event["args"]["run_ms"] == pytest.approx(step["run_s"] * 1000, abs=0.001)
    counters = [e["args"]["running"] for e in events if e["pid"] == process and e["name"] == "requests"]
    assert max(counters) == max(step["running"] for step in mine)
    begun = Counter((e["id"], e["name"]) for e in events if e["ph"] == "b")
    ended = Counter((e["id"], e["name"]) for e in events if e["ph"] == "e")
    assert begun == ended
    own = [e for e in events if e["ph"] == "b" and e["name"].startswith("request ")]
    assert Counter(event["id"] for event in own) == Counter(record["id"] for record in requests)
    assert all(event["ts"] >= 0 for event in events if "ts" in event)


def test_every_slice_of_a_request_lies_within_it(tmp_path: Path) -> None:
    results, requests, steps = small()
    events = json.loads(write_trace(Study(results, requests, steps), tmp_path / "trace.json").read_text())[
        "traceEvents"
    ]
    for record in requests[:10]:
        times = [event["ts"] for event in events if event.get("id") == record["id"]]
        assert min(times) == pytest.approx(record["intended"] * 1e6, abs=0.06)
        assert max(times) == pytest.approx(record["last"] * 1e6, abs=0.06)
        pieces = [event for event in events if event.get("id") == record["id"]][1:-1]
        ends = [event["ts"] for event in pieces]
        assert ends == sorted(ends)
        assert [event["ph"] for event in pieces] == ["b", "e"] * (len(pieces) // 2)
        assert all(end > start for start, end in zip(ends[::2], ends[1::2], strict=True))
