"""The commands, the examples and the HTTP client, as a user runs them, against the real server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers import PROMPTS, STREAMING, ask, ask_with, inputs_for, sampling_json
from observing import finished
from slipstream_client import cli
from slipstream_client.comparison.explain import explain_engine_time, explain_request_time, explain_slots
from slipstream_client.comparison.run_figures import measured, run_figures, window_s
from slipstream_client.comparison.slo import Slo
from slipstream_client.comparison.statistics import summarise_runs
from slipstream_client.errors import SlipstreamError
from slipstream_client.http_client import HttpSlipstreamClient
from slipstream_client.load.records import RequestRecord
from slipstream_client.server.tritonserver import TritonServer
from slipstream_client.tensors import RequestFailed

pytestmark = pytest.mark.server

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


def slipstream(*arguments: str | Path) -> str:
    """What the command line prints when it ends well."""
    result = CliRunner().invoke(cli.make_app([]), [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_what_the_server_answers(server: TritonServer, example: Path) -> None:
    text = example.read_text()
    assert "127.0.0.1:800" in text
    text = text.replace("127.0.0.1:8000", server.http_url).replace("127.0.0.1:8001", server.grpc_url)
    assert '"max_tokens": 48' in text
    text = text.replace('"max_tokens": 48', '"max_tokens": 12')
    answer = ask(server, "continuous", "Once upon a time", max_tokens=12)
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    printed = ended.stdout
    assert printed.replace(answer.text, "").strip() in ("", "finish reason: length")


@pytest.mark.parametrize("batcher", ["continuous", "continuous_unary", "static", "dynamic", "iterative"])
@pytest.mark.parametrize("over", ["grpc", "http"])
def test_generate_prints_the_answer_of_every_model(server: TritonServer, batcher: str, over: str) -> None:
    where = ["--url", server.grpc_url] if over == "grpc" else ["--http", "--url", server.http_url]
    printed = slipstream("generate", PROMPTS[0], "--batcher", batcher, "--max-tokens", "8", *where)
    assert printed == ask(server, "continuous", PROMPTS[0], max_tokens=8).text + "\n"


@pytest.mark.parametrize("over", ["grpc", "http"])
def test_a_chat_goes_through_the_models_template(server: TritonServer, over: str) -> None:
    where = ["--url", server.grpc_url] if over == "grpc" else ["--http", "--url", server.http_url]
    printed = slipstream("generate", "What is the capital of France?", "--chat", "--max-tokens", "12", *where)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = inputs_for("continuous", "", sampling_json(messages=chat, max_tokens=12))[1:]
    assert printed == ask_with(server, "continuous", inputs).text + "\n"
    assert "Paris" in printed


def test_a_model_that_takes_text_alone_refuses_a_chat(server: TritonServer) -> None:
    arguments = ["generate", "hello", "--chat", "--batcher", "dynamic", "--url", server.grpc_url]
    result = CliRunner().invoke(cli.make_app([]), arguments)
    assert isinstance(result.exception, RequestFailed)
    assert "dynamic takes text alone" in str(result.exception)


@pytest.mark.parametrize("model", STREAMING)
def test_the_http_client_streams_what_grpc_streams(server: TritonServer, model: str) -> None:
    client = HttpSlipstreamClient(server.http_url, model)
    chunks = list(client.stream(PROMPTS[1], max_tokens=8, temperature=0))
    answer = ask(server, model, PROMPTS[1], max_tokens=8)
    assert "".join(chunk.text for chunk in chunks) == answer.text
    assert sum(chunk.num_tokens for chunk in chunks) == answer.num_output_tokens
    assert len(chunks) > 1


def test_health_finds_every_model_and_engine_well(server: TritonServer) -> None:
    port = server.metrics_url.rpartition(":")[2]
    where = ["--url", server.http_url, "--metrics-port", port, "--runtime-dir", server.runtime_dir]
    found = json.loads(slipstream("health", *where, "--json"))
    assert found["healthy"]
    names = {check["name"] for check in found["checks"]}
    assert {f"model {model}" for model in server.models} <= names
    assert {f"{kind} {engine}" for kind in ("engine", "control") for engine in ("continuous", "static")} <= names


def test_compare_measures_all_batchers_and_finds_their_answers_equal(server: TritonServer, tmp_path: Path) -> None:
    where = ["--url", server.grpc_url, "--metrics-url", server.metrics_url, "--out", tmp_path]
    load = ["--workload", "fixed:20,6", "--concurrency", "3", "--requests", "3"]
    results = json.loads(slipstream("compare", *where, *load, "--json"))
    assert results == json.loads((tmp_path / "results.json").read_text())
    runs = {run["variant"]: run for run in results["runs"]}
    assert list(runs) == ["static", "dynamic", "iterative", "continuous"]
    quality = results["quality"]
    assert (quality["equal"], quality["compared"], quality["input_token_mismatches"]) == (True, 9, 0)
    for batcher, figures in runs.items():
        assert (figures["requests"], figures["failures"]) == (3, 0)
        # Every row but that of each answer's last token; nothing is padding where all lengths are equal.
        assert figures["useful_tokens"] == 3 * (20 + 6 - 1), batcher
        assert figures["computed_tokens"] >= figures["useful_tokens"]
        assert 0 <= figures["kv_waste_fraction"] < 1
        assert figures["kv_peak_blocks"] >= 2
        assert (figures["ttft_ms"] is not None) == (batcher in STREAMING)
        assert figures["cpu_percent"] is None, "the server is not a child of this comparison"
        assert figures["triton_inferences"] == (3 * 6 if batcher == "iterative" else 3)
    # DYN-05: what makes the run of `dynamic` one of dynamic batching.
    assert runs["static"]["triton_executions"] == 1
    assert runs["dynamic"]["triton_executions"] < 3
    assert runs["continuous"]["triton_executions"] <= 3
    records = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(records) == 12
    assert {record["output_tokens"] for record in records} == {6}
    assert {record["stats"]["cached_tokens"] for record in records} == {0}
    assert "<html" in (tmp_path / "report.html").read_text()


def test_compare_explains_where_all_rows_and_all_of_the_requests_time_went(
    server: TritonServer, tmp_path: Path
) -> None:
    where = ["--url", server.grpc_url, "--metrics-url", server.metrics_url, "--out", tmp_path]
    load = ["--workload", "mixed", "--max-output", "24", "--concurrency", "4", "--requests", "8"]
    results = json.loads(slipstream("compare", *where, *load, "--json"))
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    records = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    for run in results["runs"]:
        batcher, slots, spent = run["variant"], run["slots"], run["request_time_ms"]
        answers = [record for record in records if record["run"] == run["id"]]
        tokens = sum(record["input_tokens"] + record["output_tokens"] - 1 for record in answers)
        assert slots["useful_decode"] + slots["useful_prefill"] == tokens
        assert (slots["unexplained"], slots["total"]) == (0, run["computed_tokens"])
        assert len([step for step in steps if step["run"] == run["id"]]) >= max(r["output_tokens"] for r in answers)
        padded = slots["prompt_padding"] + slots["finished_rows"]
        assert (padded > 0) == (batcher in ("static", "dynamic")), batcher
        mean_ms = sum(record["last"] - record["intended"] for record in answers) / len(answers) * 1000
        assert spent["total"] == pytest.approx(mean_ms)
        assert abs(spent["unexplained"]) < 0.02 * spent["total"]
        assert (spent["held"] > 0) == (batcher in ("static", "dynamic")), batcher
        engine = run["engine_time_s"]
        assert abs(engine["unexplained"]) < 0.02 * engine["total"]
        assert engine["total"] == pytest.approx(run["duration_s"])


def test_everything_that_compare_states_can_be_computed_again_from_its_files(
    server: TritonServer, tmp_path: Path
) -> None:
    where = ["--url", server.grpc_url, "--metrics-url", server.metrics_url, "--out", tmp_path]
    load = ["--batchers", "dynamic,continuous", "--workload", "fixed:12,5", "--request-rate", "20", "--requests", "4"]
    more = ["--repeats", "2", "--warmup-request-count", "1", "--goodput", "e2el:60000"]
    results = json.loads(slipstream("compare", *where, *load, *more, "--json"))
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    slos = [Slo(name, **limits) for name, limits in results["plan"]["slo"].items()]
    records = {
        run["id"]: [
            RequestRecord(**line | {"chunks": [tuple(chunk) for chunk in line["chunks"]]})
            for line in lines
            if line["run"] == run["id"]
        ]
        for run in results["runs"]
    }
    for run in results["runs"]:
        mine, own_steps = records[run["id"]], [step for step in steps if step["run"] == run["id"]]
        counted = measured(mine)
        start = min(record.sent or 0.0 for record in counted)
        lock_step = run["variant"] == "dynamic"
        stated = run_figures(mine, slos) | {
            "slots": explain_slots(own_steps, run["computed_tokens"]),
            "engine_time_s": explain_engine_time(own_steps, start, start + window_s(counted)),
            "request_time_ms": explain_request_time(counted, own_steps, run["clock_offset_s"], lock_step=lock_step),
        }
        assert json.loads(json.dumps(stated)) == {key: run[key] for key in stated}
    concluded = summarise_runs(results["runs"], records, "dynamic", "e2el:60000")
    assert json.loads(json.dumps(concluded)) == {key: results[key] for key in concluded}


def test_compare_refuses_a_workload_that_no_context_holds_before_it_sends_anything(
    server: TritonServer, tmp_path: Path
) -> None:
    before = finished(server, "continuous", "length")
    where = ["--url", server.grpc_url, "--out", str(tmp_path), "--batchers", "continuous"]
    result = CliRunner().invoke(
        cli.make_app([]), ["compare", *where, "--workload", "fixed:8000,400", "--requests", "1"]
    )
    assert result.exit_code == 1
    assert isinstance(result.exception, SlipstreamError)
    assert "8000 prompt tokens and max_tokens 400; together at most 8192 are allowed" in str(result.exception)
    assert not (tmp_path / "results.json").exists()
    assert finished(server, "continuous", "length") == before


def test_compare_says_where_the_dynamic_batcher_did_not_batch(server: TritonServer, tmp_path: Path) -> None:
    """DYN-05: a client that sends one request after the other leaves it nothing to batch."""
    where = ["--url", server.grpc_url, "--metrics-url", server.metrics_url, "--out", tmp_path]
    load = ["--batchers", "dynamic,continuous", "--workload", "fixed:8,2", "--concurrency", "1", "--requests", "2"]
    printed = " ".join(slipstream("compare", *where, *load).split())
    said = "dynamic at 1 client (fixed:8,2): Triton's dynamic batcher did not batch (2 requests in 2 executions)"
    assert said in printed
    assert said in (tmp_path / "report.html").read_text().replace("&#39;", "'")
    (run, _) = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert (run["triton_inferences"], run["triton_executions"]) == (2, 2)
