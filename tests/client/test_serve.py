"""`slipstream serve` as a user runs it: a process that gets signals."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import typer
from typer.testing import CliRunner

from fake_engine import FakeEngine
from serving import FREE_PORTS, SLIPSTREAM, Serving
from slipstream_client.commands.serve import _curl_lines, serve
from slipstream_client.errors import SlipstreamError
from tiny_repository import write_repository


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repository(tmp_path_factory.mktemp("repository"))


@pytest.fixture
def serving(repository: Path, tmp_path: Path) -> Iterator[Serving]:
    running = Serving(tmp_path / "log", "--repository", str(repository), "--models", "echo")
    yield running
    running.kill()


@pytest.mark.server
def test_sigterm_drains_the_engines_stops_the_server_and_exits_with_0(serving: Serving) -> None:
    FakeEngine(Path(serving.ready["runtime_dir"]), "tiny", lambda _: {"type": "drained", "finished": 3, "aborted": 1})
    serving.process.send_signal(signal.SIGTERM)
    assert serving.event()["event"] == "draining"
    assert serving.event() == {"event": "stopped", "engines": {"tiny": {"finished": 3, "aborted": 1}}}
    assert serving.ended() == (0, "")


@pytest.mark.server
def test_a_second_ctrl_c_ends_everything_while_an_engine_still_drains(serving: Serving) -> None:
    asked = threading.Event()

    def drain(_message: dict[str, Any]) -> dict[str, Any]:
        asked.set()
        time.sleep(60)
        return {}

    FakeEngine(Path(serving.ready["runtime_dir"]), "tiny", drain)
    serving.process.send_signal(signal.SIGINT)
    assert asked.wait(10)
    began = time.monotonic()
    serving.process.send_signal(signal.SIGINT)
    assert [serving.event()["event"] for _ in range(2)] == ["draining", "killed"]
    assert serving.ended() == (1, "")
    assert time.monotonic() - began < 10  # the drain would have taken 20


@pytest.mark.server
def test_ctrl_c_during_the_start_ends_it_at_once(repository: Path, tmp_path: Path) -> None:
    options = ["--repository", str(repository), "--models", "slow", "--log", str(tmp_path / "log"), *FREE_PORTS]
    command = [*SLIPSTREAM, "serve", "--json", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (started := psutil.Process(process.pid).children(recursive=True)[1:]):  # the server and the model's stub
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=15)
    assert (process.returncode, errors) == (128 + signal.SIGINT, "")
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in started)


@pytest.mark.server
def test_a_server_that_dies_is_one_line_and_exit_code_1(serving: Serving) -> None:
    serving.server.kill()
    code, errors = serving.ended()
    assert code == 1
    assert errors == f"slipstream: tritonserver ended by itself: killed by SIGKILL (log: {serving.ready['log']})\n"


@pytest.mark.server
def test_a_model_whose_process_was_killed_answers_again(serving: Serving) -> None:
    (stub,) = serving.server.children()
    stub.kill()
    assert [serving.event()["message"] for _ in range(2)] == [
        "echo: its process ended; loading it again",
        "echo: ready again",
    ]
    url = f"http://{serving.ready['http']}/v2/models/echo/generate"
    with urllib.request.urlopen(url, data=b'{"text_input": "again"}', timeout=10) as answer:
        assert json.load(answer)["text_output"] == "again"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--models", "eco"], "no model 'eco' in"),
        (["--models", ""], "no model named"),
        (["--device", "tpu"], "--device is 'tpu'; allowed are auto, cpu, cuda"),
        (["--model", "no/such", "--models", "echo"], "slipstream model pull no/such"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_started(repository: Path, options: list[str], error: str) -> None:
    app = typer.Typer()
    app.command()(serve)
    result = CliRunner().invoke(app, ["--repository", str(repository), *options])
    assert isinstance(result.exception, SlipstreamError)
    assert error in str(result.exception)
    assert result.stdout == ""


def test_an_expected_failure_is_one_line_on_standard_error_and_exit_code_1(repository: Path) -> None:
    command = [*SLIPSTREAM, "serve", "--repository", str(repository), "--models", "eco"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("slipstream: no model 'eco' in ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        (["continuous", "dynamic"], ["continuous/generate", "continuous/generate_stream"]),
        (["continuous_unary", "iterative"], ["continuous_unary/generate"]),
        (["dynamic"], ["dynamic/generate"]),
        (["iterative"], ["iterative/generate_stream"]),
        (["somebody_elses"], []),
    ],
)
def test_the_printed_curl_lines_are_whole_commands_for_a_loaded_model(models: list[str], expected: list[str]) -> None:
    server: Any = SimpleNamespace(models=models, http_url="127.0.0.1:8000")
    commands = [shlex.split(line) for line in _curl_lines(server) if line]
    assert [command[2].removeprefix("http://127.0.0.1:8000/v2/models/") for command in commands] == expected
    for command in commands:
        body = json.loads(command[4])
        parameters = json.loads(body["sampling_parameters"]) if "sampling_parameters" in body else body
        assert (command[0], command[3], body["text_input"]) == ("curl", "-d", "The capital of France is")
        assert (parameters["max_tokens"], parameters["temperature"]) == (32, 0)
        assert body.get("stream", False) == (command[2].endswith("continuous/generate_stream"))
