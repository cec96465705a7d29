"""`slipstream compare` against a scripted server: what it writes, says and exits with."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from fake_triton import Fail, FakeTriton, Received, Say, Wait, answer, ids_of_request, interrupt_when
from slipstream_client import cli
from slipstream_client.comparison.environment import describe_environment, describe_server
from slipstream_client.comparison.estimate import run_seconds
from slipstream_client.load.arrivals import OpenLoop, offered_sha256
from slipstream_client.load.records import RequestRecord, write_records
from slipstream_client.load.workload import make_workload
from slipstream_client.report.folder import read_folder
from slipstream_client.tensors import ModelContract

RUN_KEYS = """id variant model executor streams workload load point repeat clock_offset_s valid invalid_because
client_lag_ms client_processes requests failures refusals cancelled empty retries duration_s output_tokens_per_s
input_tokens_per_s requests_per_s ttft_ms itl_ms icl_ms tpot_ms e2e_ms ttft_intended_ms e2e_intended_ms queue_ms
tokens_per_chunk slo useful_tokens computed_tokens padding_fraction kv_waste_fraction kv_peak_blocks preemptions
triton_inferences triton_executions cpu_percent rss_bytes slots engine_time_s request_time_ms"""


@pytest.fixture
def no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts and report take seconds to draw; a test that is about neither does without."""
    monkeypatch.setattr("slipstream_client.commands.compare.write_pages", lambda *_: (None, None))


def compare(triton: FakeTriton, out: Path, *more: str, workload: str = "fixed:3,4") -> Any:
    arguments = ["compare", "--url", triton.url, "--out", str(out), "--workload", workload]
    return CliRunner().invoke(cli.make_app([]), [*arguments, *more])


def results_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]


def test_a_clean_comparison_writes_everything_and_exits_with_0(triton: FakeTriton, tmp_path: Path) -> None:
    result = compare(triton, tmp_path, "--concurrency", "1,2", "--requests", "3,4")
    assert result.exit_code == 0, result.output
    results = results_of(tmp_path)
    batchers = ["static", "dynamic", "iterative", "continuous"]
    assert [(run["variant"], run["point"], run["requests"]) for run in results["runs"]] == [
        *((batcher, "c1", 3) for batcher in batchers),
        *((batcher, "c2", 4) for batcher in batchers),
    ]
    assert [run["id"] for run in results["runs"]] == results["plan"]["order"]
    assert all(set(RUN_KEYS.split()) <= set(run) for run in results["runs"])
    assert [run["ttft_ms"] is None for run in results["runs"][:4]] == [True, True, False, False]
    assert results["version"] == 2
    assert results["interrupted"] is False
    workload = make_workload("fixed:3,4", 4)
    (described,) = results["workloads"]
    assert (described["name"], described["sha256"]) == ("fixed:3,4", workload.sha256)
    assert described["offered"] == {
        "c1": offered_sha256(workload.requests[:3]),
        "c2": offered_sha256(workload.requests),
    }
    quality = results["quality"]
    assert (quality["equal"], quality["compared"], quality["different"]) == (True, 24, [])
    assert len(results["comparisons"]) == 6  # three variants against dynamic, at two points
    assert results["tuning"] is None, "the server is not ours to set"
    lines = lines_of(tmp_path)
    assert len(lines) == 28
    assert lines[0]["output_ids"] == ids_of_request(
        Received("", "", [workload.requests[0].text], [{"stop_length": 4}], {}, 0)
    )
    assert lines[0]["run"] == "static/fixed:3,4/c1/1"
    assert {"intended", "sent", "first", "last", "chunks", "error", "finish_reason", "phase"} <= set(lines[0])
    assert (tmp_path / "steps.jsonl").read_text() == "", "it has no model `admin`"
    assert (tmp_path / "throughput.png").read_bytes().startswith(b"\x89PNG")
    assert "no stream" in result.stdout
    assert "answers: equal in all 24 comparisons" in result.stdout
    assert result.stdout.rstrip().endswith(f"report: {tmp_path / 'report.html'}")
    assert "estimate: about" in result.stderr


@pytest.mark.usefixtures("no_pages")
def test_repeats_are_interleaved_and_tell_the_noise(triton: FakeTriton, tmp_path: Path) -> None:
    arguments = ("--concurrency", "2", "--requests", "4", "--repeats", "2", "--batchers", "dynamic,continuous")
    assert compare(triton, tmp_path, *arguments).exit_code == 0
    results = results_of(tmp_path)
    assert [(run["variant"], run["repeat"]) for run in results["runs"]] == [
        ("dynamic", 0),
        ("continuous", 0),
        ("continuous", 1),
        ("dynamic", 1),
    ]
    assert results["noise"]["runs_compared"] == 4
    assert results["noise"]["metrics"]["output_tokens_per_s"]["degrees_of_freedom"] == 2


@pytest.mark.usefixtures("no_pages")
def test_an_open_loop_keeps_its_times_and_warm_up_counts_in_no_figure(triton: FakeTriton, tmp_path: Path) -> None:
    arguments = ("--request-rate", "50", "--requests", "6", "--batchers", "continuous", "--goodput", "ttft:9000")
    extra = ("--warmup-request-count", "2", "--cooldown-request-count", "1")
    assert compare(triton, tmp_path, *arguments, *extra).exit_code == 0
    (run,) = results_of(tmp_path)["runs"]
    lines = lines_of(tmp_path)
    assert [line["phase"] for line in lines] == ["warm_up"] * 2 + ["measured"] * 6 + ["cool_down"]
    assert [line["intended"] for line in lines] == OpenLoop(50.0).intended_times(9, 0)
    assert (run["point"], run["requests"], run["load"]["rate"]) == ("r50", 6, 50.0)
    assert run["slo"]["ttft:9000"]["good"] == 6
    assert run["e2e_intended_ms"]["mean"] > run["e2e_ms"]["mean"]


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
        bad = received.id == "continuous/fixed:3,4/c2/1/00001"
        return [Fail("engine is down", grpc.StatusCode.UNAVAILABLE)] if bad else answer(ids_of_request(received))

    triton.script = script
    result = compare(triton, tmp_path, "--concurrency", "2", "--requests", "4", "--batchers", "dynamic,continuous")
    assert result.exit_code == 1
    by_batcher = {run["variant"]: run for run in results_of(tmp_path)["runs"]}
    assert (by_batcher["dynamic"]["failures"], by_batcher["continuous"]["failures"]) == (0, 1)
    assert "1 of 4" in result.stdout
    assert "failed: engine is down" in result.stderr
    failed = [line for line in lines_of(tmp_path) if line["error"]]
    assert [(line["id"], line["error_code"]) for line in failed] == [("continuous/fixed:3,4/c2/1/00001", "UNAVAILABLE")]
    assert (tmp_path / "report.html").exists()


@pytest.mark.usefixtures("no_pages")
def test_a_different_answer_is_named_and_exits_with_1(triton: FakeTriton, tmp_path: Path) -> None:
    first, other = (f"{batcher}/fixed:3,4/c1/1/00002" for batcher in ("dynamic", "continuous"))

    def script(received: Received) -> list[Say | Fail | Wait]:
        ids = ids_of_request(received)
        return answer([*ids[:2], 7777, *ids[3:]] if received.id == other else ids)

    triton.script = script
    result = compare(triton, tmp_path, "--concurrency", "1", "--requests", "3", "--batchers", "dynamic,continuous")
    assert result.exit_code == 1
    quality = results_of(tmp_path)["quality"]
    difference = {"request": other, "reference": first, "first_difference": 2}
    assert (quality["equal"], quality["compared"], quality["different"]) == (False, 3, [difference])
    assert f"{other} differs from {first} at output token 2" in result.stdout


@pytest.mark.usefixtures("no_pages")
def test_prompts_of_another_length_than_meant_are_reported(triton: FakeTriton, tmp_path: Path) -> None:
    result = compare(triton, tmp_path, "--concurrency", "1", "--requests", "2", "--batchers", "continuous")
    assert results_of(tmp_path)["quality"]["input_token_mismatches"] == 2  # the fake always says 7
    assert "2 prompts had another number of tokens than meant" in result.stderr
    assert result.exit_code == 0


@pytest.mark.usefixtures("no_pages")
def test_prompts_of_a_file_have_no_length_to_miss(triton: FakeTriton, tmp_path: Path) -> None:
    triton.script = lambda received: answer([1, 2, 3])
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Why is the sky blue?"}\n{"prompt": "And the sea?", "max_tokens": 9}\n')
    load = ["--concurrency", "2", "--requests", "2", "--batchers", "static,continuous"]
    result = compare(triton, tmp_path, *load, workload=str(prompts))
    assert result.exit_code == 0, result.output
    results = results_of(tmp_path)
    assert [workload["name"] for workload in results["workloads"]] == ["prompts.jsonl"]
    assert results["quality"]["input_token_mismatches"] == 0
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
        if received.id.startswith("continuous/fixed:3,4/c1") and len(received.text.split()) == 3:
            stalled.set()
            return [Say([1]), Wait(30.0)]
        return answer(ids_of_request(received))

    triton.script = script
    with interrupt_when(stalled, again_after_s=60.0, number=number):
        result = compare(triton, tmp_path, "--concurrency", "1", "--requests", "2", "--batchers", "dynamic,continuous")
    assert result.exit_code == 130
    results = results_of(tmp_path)
    assert results["interrupted"] is True
    assert [run["variant"] for run in results["runs"]] == ["dynamic"]
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


def test_a_full_disk_leaves_the_runs_that_were_complete(
    triton: FakeTriton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_up(path: Path, records: list[RequestRecord]) -> None:
        write_records(path, records)
        if {record.run for record in records} != {"dynamic/fixed:3,4/c1/1"}:
            path.write_text(path.read_text()[:-9])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("slipstream_client.comparison.comparison.write_records", fill_up)
    result = compare(triton, tmp_path, "--concurrency", "1", "--requests", "2", "--batchers", "dynamic,continuous")
    assert str(result.exception) == f"cannot write to {tmp_path}: No space left on device"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["requests.jsonl", "results.json", "steps.jsonl"]
    results, requests, _ = read_folder(tmp_path)
    assert results["interrupted"] is True
    assert [run["variant"] for run in results["runs"]] == ["dynamic"]
    assert [record["run"] for record in requests] == ["dynamic/fixed:3,4/c1/1"] * 2


@pytest.mark.usefixtures("no_pages")
def test_interrupted_before_a_run_was_complete_it_leaves_an_earlier_comparison_alone(
    triton: FakeTriton, tmp_path: Path
) -> None:
    arguments = ("--concurrency", "1", "--requests", "1", "--batchers", "dynamic")
    assert compare(triton, tmp_path, *arguments).exit_code == 0
    earlier = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    stalled = threading.Event()

    def script(received: Received) -> list[Say | Fail | Wait]:
        stalled.set()
        return [Wait(30.0)]

    triton.script = script
    with interrupt_when(stalled, again_after_s=60.0, number=signal.SIGINT):
        result = compare(triton, tmp_path, *arguments)
    assert result.exit_code == 130
    assert "interrupted: no run was complete" in result.stderr
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == earlier


@pytest.mark.usefixtures("no_pages")
def test_more_clients_than_requests_are_not_started(triton: FakeTriton, tmp_path: Path) -> None:
    result = compare(triton, tmp_path, "--concurrency", "60000", "--requests", "2", "--batchers", "static,dynamic")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batchers", ","], "--batchers names no batcher"),
        (["--concurrency", "0"], "--concurrency '0'"),
        (["--concurrency", "a"], "--concurrency 'a'"),
        (["--concurrency", "1,2", "--requests", "1,2,3"], "3 numbers for 2 loads"),
        (["--concurrency", "1", "--request-rate", "2"], "--concurrency and --request-rate exclude each other"),
        (["--requests", "2", "--warmup-request-count", "1", "--reference", "nope"], "the baseline is 'nope'"),
        (["--variant", "continuous,prefix_cache=off"], "cannot be set with --url"),
        (["--goodput", "ttft=200"], "is neither a preset nor a limit"),
        (["--baseline", "nowhere"], "nowhere"),
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


def test_the_estimate_knows_what_lock_step_costs() -> None:
    requests = make_workload("mixed", 64).requests
    lock_step, step_by_step = (run_seconds(model, "native", requests, 16) for model in ("dynamic", "continuous"))
    assert 1.5 < lock_step / step_by_step < 5
    alone = make_workload("fixed:10,3", 2).requests
    # A prompt of 10 rows and two further tokens, twice.
    assert run_seconds("continuous", "native", alone, 1) == pytest.approx(2 * (0.022 + 0.034 + 2 * 0.0254))
    assert run_seconds("static", "native", alone, 1) == pytest.approx(run_seconds("continuous", "native", alone, 1))
    assert run_seconds("static", "transformers", alone, 1) > 2 * run_seconds("static", "native", alone, 1)


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
