"""`slipstream compare` against a scripted server: what it writes, says and exits with."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import io
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from rich.console import Console
from typer.testing import CliRunner

from fake_triton import Fail, FakeTriton, Received, Say, Wait, answer, ids_of_request, interrupt_when
from slipstream_client import cli
from slipstream_client.comparison.environment import describe_environment, describe_server
from slipstream_client.comparison.estimate import run_seconds
from slipstream_client.load.workload import make_workload
from slipstream_client.report.compare_table import compare_tables
from slipstream_client.tensors import ModelContract

RUN_KEYS = """batcher executor concurrency requests failures duration_s output_tokens_per_s requests_per_s ttft_ms
itl_ms tpot_ms e2e_ms queue_ms useful_tokens computed_tokens padding_fraction kv_waste_fraction kv_peak_blocks
cpu_percent rss_bytes"""


@pytest.fixture
def no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts and report take seconds to draw; a test that is about neither does without."""
    monkeypatch.setattr("slipstream_client.commands.compare._write_pages", lambda comparison: comparison.out / "none")


def compare(triton: FakeTriton, out: Path, *more: str) -> Any:
    arguments = ["compare", "--url", triton.url, "--out", str(out), "--workload", "fixed:3,4"]
    return CliRunner().invoke(cli.app, [*arguments, *more])


def results_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]


def test_a_clean_comparison_writes_everything_and_exits_with_0(triton: FakeTriton, tmp_path: Path) -> None:
    result = compare(triton, tmp_path, "--concurrency", "1,2", "--requests", "3,4")
    assert result.exit_code == 0, result.output
    results = results_of(tmp_path)
    batchers = ["static", "dynamic", "iterative", "continuous"]
    assert [(run["batcher"], run["concurrency"], run["requests"]) for run in results["runs"]] == [
        *((batcher, 1, 3) for batcher in batchers),
        *((batcher, 2, 4) for batcher in batchers),
    ]
    assert all(set(RUN_KEYS.split()) <= set(run) for run in results["runs"])
    assert [run["ttft_ms"] is None for run in results["runs"][:4]] == [True, True, False, False]
    assert results["version"] == 1
    assert results["interrupted"] is False
    workload = make_workload("fixed:3,4", 4)
    assert (results["workload"]["name"], results["workload"]["sha256"]) == ("fixed:3,4", workload.sha256)
    assert results["quality"] == {"equal": True, "compared": 24, "different": []}
    lines = lines_of(tmp_path)
    assert len(lines) == 28
    assert lines[0]["output_ids"] == ids_of_request(
        Received("", "", [workload.requests[0].text], [{"stop_length": 4}], {}, 0)
    )
    assert {"intended", "sent", "first", "last", "chunks", "error", "finish_reason"} <= set(lines[0])
    assert (tmp_path / "throughput.png").read_bytes().startswith(b"\x89PNG")
    assert "no stream" in result.stdout
    assert "answers: equal in all 24 comparisons" in result.stdout
    assert result.stdout.rstrip().endswith(f"report: {tmp_path / 'report.html'}")
    assert "estimate: about" in result.stderr


@pytest.mark.usefixtures("no_pages")
def test_every_batcher_gets_the_same_requests(triton: FakeTriton, tmp_path: Path) -> None:
    compare(triton, tmp_path, "--concurrency", "2", "--requests", "6", "--batchers", "static,continuous")
    offered = [request.text for request in make_workload("fixed:3,4", 6).requests]
    measured = [received for received in triton.received if len(received.text.split()) == 3]  # not the warm-up
    for batcher in ("static", "continuous"):
        texts = [text for received in measured if received.model == batcher for text in received.texts]
        assert sorted(texts) == sorted(offered)


def test_a_failed_request_is_counted_shown_and_exits_with_1(triton: FakeTriton, tmp_path: Path) -> None:
    def script(received: Received) -> list[Say | Fail | Wait]:
        bad = received.id == "continuous-c2-00001"
        return [Fail("engine is down", grpc.StatusCode.UNAVAILABLE)] if bad else answer(ids_of_request(received))

    triton.script = script
    result = compare(triton, tmp_path, "--concurrency", "2", "--requests", "4", "--batchers", "dynamic,continuous")
    assert result.exit_code == 1
    by_batcher = {run["batcher"]: run for run in results_of(tmp_path)["runs"]}
    assert (by_batcher["dynamic"]["failures"], by_batcher["continuous"]["failures"]) == (0, 1)
    assert "1 of 4" in result.stdout
    assert "failed: engine is down" in result.stderr
    failed = [line for line in lines_of(tmp_path) if line["error"]]
    assert [(line["id"], line["error_code"]) for line in failed] == [("continuous-c2-00001", "UNAVAILABLE")]
    assert (tmp_path / "report.html").exists()


@pytest.mark.usefixtures("no_pages")
def test_a_different_answer_is_named_and_exits_with_1(triton: FakeTriton, tmp_path: Path) -> None:
    def script(received: Received) -> list[Say | Fail | Wait]:
        ids = ids_of_request(received)
        return answer([*ids[:2], 7777, *ids[3:]] if received.id == "continuous-c1-00002" else ids)

    triton.script = script
    result = compare(triton, tmp_path, "--concurrency", "1", "--requests", "3", "--batchers", "dynamic,continuous")
    assert result.exit_code == 1
    difference = {"request": "continuous-c1-00002", "reference": "dynamic-c1-00002", "first_difference": 2}
    assert results_of(tmp_path)["quality"] == {"equal": False, "compared": 3, "different": [difference]}
    assert "continuous-c1-00002 differs from dynamic-c1-00002 at output token 2" in result.stdout


@pytest.mark.usefixtures("no_pages")
def test_prompts_of_another_length_than_meant_are_reported(triton: FakeTriton, tmp_path: Path) -> None:
    result = compare(triton, tmp_path, "--concurrency", "1", "--requests", "2", "--batchers", "continuous")
    assert results_of(tmp_path)["workload"]["input_token_mismatches"] == 2  # the fake always says 7
    assert "2 prompts had another number of tokens than meant" in result.stderr
    assert result.exit_code == 0


@pytest.mark.usefixtures("no_pages")
def test_prompts_of_a_file_have_no_length_to_miss(triton: FakeTriton, tmp_path: Path) -> None:
    triton.script = lambda received: answer([1, 2, 3])
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Why is the sky blue?"}\n{"prompt": "And the sea?", "max_tokens": 9}\n')
    load = ["--workload", str(prompts), "--concurrency", "2", "--requests", "2", "--batchers", "static,continuous"]
    result = compare(triton, tmp_path, *load)
    assert result.exit_code == 0, result.output
    results = results_of(tmp_path)
    assert (results["workload"]["name"], results["workload"]["input_token_mismatches"]) == ("prompts.jsonl", 0)
    assert [run["failures"] for run in results["runs"]] == [0, 0]
    rows = [row for received in triton.received for row in received.rows() if row.text == "And the sea?"]
    assert [row.sampling[0]["max_tokens"] for row in rows] == [9, 9]
    assert not any("stop_length" in row.sampling[0] or "ignore_eos" in row.sampling[0] for row in rows)


@pytest.mark.usefixtures("no_pages")
def test_json_prints_the_results_and_nothing_else_on_standard_output(triton: FakeTriton, tmp_path: Path) -> None:
    result = compare(triton, tmp_path, "--concurrency", "1", "--requests", "2", "--batchers", "continuous", "--json")
    assert json.loads(result.stdout) == results_of(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupting_keeps_the_complete_runs_and_says_so(
    triton: FakeTriton, tmp_path: Path, number: signal.Signals, request: pytest.FixtureRequest
) -> None:
    if number != signal.SIGINT:
        request.getfixturevalue("no_pages")
    stalled = threading.Event()

    def script(received: Received) -> list[Say | Fail | Wait]:
        if received.id.startswith("continuous-c1-") and len(received.text.split()) == 3:
            stalled.set()
            return [Say([1]), Wait(30.0)]
        return answer(ids_of_request(received))

    triton.script = script
    with interrupt_when(stalled, again_after_s=60.0, number=number):
        result = compare(triton, tmp_path, "--concurrency", "1", "--requests", "2", "--batchers", "dynamic,continuous")
    assert result.exit_code == 130
    results = results_of(tmp_path)
    assert results["interrupted"] is True
    assert [run["batcher"] for run in results["runs"]] == ["dynamic"]
    assert (tmp_path / "report.html").exists() == (number == signal.SIGINT)
    assert triton.cancel_seen.wait(5)


@pytest.mark.usefixtures("no_pages")
def test_one_comparison_at_a_time_writes_to_a_folder(triton: FakeTriton, tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # as the other one does
    arguments = ("--concurrency", "1", "--requests", "1", "--batchers", "dynamic")
    result = compare(triton, tmp_path, *arguments)
    assert str(result.exception) == f"another comparison writes to {tmp_path}"
    os.close(descriptor)
    assert compare(triton, tmp_path, *arguments).exit_code == 0


def test_what_cannot_be_written_is_shown_all_the_same(
    triton: FakeTriton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("slipstream_client.comparison.comparison.write_records", full)
    result = compare(triton, tmp_path, "--concurrency", "1", "--requests", "2", "--batchers", "dynamic")
    assert "dynamic" in result.stdout
    assert "report:" not in result.stdout
    assert str(result.exception) == f"cannot write to {tmp_path}: No space left on device"


@pytest.mark.usefixtures("no_pages")
def test_more_clients_than_requests_are_not_started(triton: FakeTriton, tmp_path: Path) -> None:
    result = compare(triton, tmp_path, "--concurrency", "9" * 22, "--requests", "2", "--batchers", "static,dynamic")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batchers", ","], "--batchers names no batcher"),
        (["--concurrency", "0"], "--concurrency '0'"),
        (["--concurrency", "a"], "--concurrency 'a'"),
        (["--concurrency", "1,2", "--requests", "1,2,3"], "3 numbers for 2 concurrencies"),
        (["--workload", "heavy"], "no workload 'heavy'"),
        (["--batchers", "nope"], "'nope'"),
        (["--device", "cuda"], "cannot be changed with --url"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_with_1(
    triton: FakeTriton, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any, arguments, message: str
) -> None:
    command = ["slipstream", "compare", "--url", triton.url, "--out", str(tmp_path), *arguments]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("slipstream: ")
    assert message in last


def test_ratios_are_to_dynamic_and_fall_away_where_requests_failed() -> None:
    runs = [_run("static", 100.0, 4000.0), _run("dynamic", 100.0, 4000.0), _run("continuous", 310.0, 1000.0)]

    def shown() -> list[str]:
        console = Console(width=140, file=io.StringIO(), record=True)
        console.print(*compare_tables({"runs": runs}, []))
        return [" ".join(line.split()) for line in console.export_text().splitlines()]

    assert "continuous 310.0 3.1x 1.00 s 0.25x 1.00 s 0.25x no stream no stream 50% 0" in shown()
    assert "dynamic 100.0 4.00 s 4.00 s no stream no stream 50% 0" in shown()
    runs[2]["failures"] = 1
    assert "continuous 310.0 1.00 s 1.00 s no stream no stream 50% 1 of 200" in shown()


def test_the_tail_is_named_for_what_it_is(tmp_path: Path) -> None:
    few, many = _run("dynamic", 100.0, 4000.0, requests=50), _run("continuous", 100.0, 4000.0, requests=200)

    def headers(*runs: dict[str, Any]) -> list[Any]:
        (table,) = compare_tables({"runs": list(runs)}, [])
        return [column.header for column in table.columns][5:6]

    assert headers(few) == ["max of 50"]
    assert headers(many) == ["P99"]
    assert headers(few, many) == ["tail"]


def _run(batcher: str, rate: float, mean: float, *, failures: int = 0, requests: int = 200) -> dict[str, Any]:
    e2e = {"mean": mean, "p50": mean, "p90": mean, "p99": mean}
    figures = {"output_tokens_per_s": rate, "e2e_ms": e2e, "ttft_ms": None, "padding_fraction": 0.5}
    place = {"batcher": batcher, "executor": "native", "concurrency": 4, "requests": requests, "failures": failures}
    return place | figures


def test_the_estimate_knows_what_lock_step_costs() -> None:
    requests = make_workload("mixed", 64).requests
    lock_step, step_by_step = run_seconds("dynamic", requests, 16), run_seconds("continuous", requests, 16)
    assert 1.5 < lock_step / step_by_step < 5
    alone = make_workload("fixed:10,3", 2).requests
    # A prompt of 10 rows and two further tokens, twice.
    assert run_seconds("continuous", alone, 1) == pytest.approx(2 * (0.022 + 0.034 + 2 * 0.0254))
    assert run_seconds("static", alone, 1) == pytest.approx(run_seconds("continuous", alone, 1))


def test_the_environment_names_no_host_user_or_folder() -> None:
    text = json.dumps(describe_environment() | describe_server([], "triton 2", "/somewhere/secret/my-model", "cpu"))
    for private in (str(Path.home()), Path.cwd().name + "/", "secret", asyncio.__file__):
        assert private not in text
    assert "my-model" in text
    assert describe_server([], "triton 2", "smollm2-135m", "cpu")["model_note"].startswith(
        "The weights are de-quantised"
    )


def test_engine_parameters_that_differ_are_shown_for_each_model() -> None:
    def contract(name: str, seats: str) -> ModelContract:
        return ModelContract(name, frozenset(), False, 16, False, {"max_num_seqs": seats, "block_size": "16"})

    engine = describe_server([contract("static", "16"), contract("continuous", "8")], "triton 2")["engine"]
    assert engine == {"max_num_seqs": {"static": "16", "continuous": "8"}, "block_size": "16"}
