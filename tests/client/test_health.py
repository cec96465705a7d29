"""`slipstream health` against a real server, one of whose models publishes the gauge of an engine."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fake_engine import FakeEngine
from slipstream_client.commands.health import health
from slipstream_client.http_client import HttpSlipstreamClient
from slipstream_client.server.tritonserver import TritonServer
from slipstream_client.tensors import RequestFailed
from tiny_repository import write_repository

app = typer.Typer()
app.command()(health)

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = write_repository(tmp_path_factory.mktemp("repository"))
    with TritonServer(["echo", "gauge"], repository=repository, http_port=0, grpc_port=0, metrics_port=0) as server:
        yield server


def check(server: TritonServer, *options: str) -> tuple[int, dict[str, tuple[bool, str]]]:
    """Exit code, and what was found by the name of the check."""
    arguments = ["--url", server.http_url, "--metrics-port", str(server.metrics_port), "--json", *options]
    result = CliRunner().invoke(app, arguments)
    answer = json.loads(result.stdout)
    assert answer["healthy"] == (result.exit_code == 0)
    return result.exit_code, {each["name"]: (each["ok"], each["detail"]) for each in answer["checks"]}


def set_gauge(server: TritonServer, value: float) -> None:
    body = json.dumps({"text_input": str(value)}).encode()
    urllib.request.urlopen(f"http://{server.http_url}/v2/models/gauge/generate", data=body, timeout=10).close()


def test_a_server_with_ready_models_and_living_engines_is_healthy(server: TritonServer) -> None:
    set_gauge(server, 1)
    code, checks = check(server)
    assert code == 0
    assert list(checks) == ["server live", "server ready", "model echo", "model gauge", "engine tiny"]
    assert all(ok for ok, _ in checks.values())


def test_what_is_no_triton_is_called_so() -> None:
    class Page(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>hello</html>")

        do_GET = do_POST = _answer

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        url = f"127.0.0.1:{web.server_port}"
        result = CliRunner().invoke(app, ["--url", url, "--metrics-port", str(web.server_port)])
        with pytest.raises(RequestFailed, match=f"what answers at {url} is no Triton over HTTP"):
            HttpSlipstreamClient(url).generate("hello")
        web.shutdown()
    assert result.exit_code == 1
    assert f"FAIL  models: what answers at {url} is no Triton" in result.stdout


def test_a_dead_engine_makes_a_ready_server_unhealthy(server: TritonServer) -> None:
    set_gauge(server, 0)
    code, checks = check(server)
    assert code == 1
    assert checks["engine tiny"] == (False, "down")
    assert checks["server ready"][0]


def test_a_named_model_that_is_not_loaded_or_not_there_is_unhealthy(server: TritonServer) -> None:
    set_gauge(server, 1)
    code, checks = check(server, "--model", "facts", "--model", "nothing", "--model", "echo")
    assert code == 1
    assert checks["model facts"] == (False, "not loaded")
    assert checks["model nothing"] == (False, "not in the repository")
    assert checks["model echo"][0]


def test_engines_are_asked_themselves_when_their_folder_is_given(server: TritonServer, tmp_path: Path) -> None:
    set_gauge(server, 1)
    assert check(server, "--runtime-dir", str(tmp_path))[1]["control sockets"] == (False, f"none in {tmp_path}")
    states = iter(["ready", "draining"])

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        if message != {"type": "status"}:
            return {}
        return {"type": "status", "state": next(states), "running": 2, "waiting": 0, "pid": 7}

    FakeEngine(server.runtime_dir, "tiny", answer)
    code, checks = check(server, "--runtime-dir", str(server.runtime_dir))
    assert (code, checks["control tiny"]) == (0, (True, "ready, 2 running, 0 waiting, process 7"))
    code, checks = check(server, "--runtime-dir", str(server.runtime_dir))
    assert (code, checks["control tiny"]) == (1, (False, "draining, 2 running, 0 waiting, process 7"))


def test_no_server_at_all_is_said_and_unhealthy() -> None:
    result = CliRunner().invoke(app, ["--url", "127.0.0.1:9", "--metrics-port", "9"])
    assert result.exit_code == 1
    assert result.stdout.startswith("FAIL  server: no server answers at 127.0.0.1:9")
