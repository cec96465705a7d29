"""Starting and ending a real tritonserver with tiny models."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from fake_engine import FakeEngine
from slipstream_client.errors import SlipstreamError
from slipstream_client.server import installation, paths
from slipstream_client.server.model_repository import RepositoryError, find_repository, language_models
from slipstream_client.server.ports import free_ports
from slipstream_client.server.startup_log import failure_reason
from slipstream_client.server.stubs import living_stubs
from slipstream_client.server.tritonserver import ServerError, TritonServer
from tiny_repository import write_repository


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repository(tmp_path_factory.mktemp("repository"))


@pytest.fixture
def make_server(repository: Path) -> Any:
    """Build servers on free ports; whatever is left of them is killed when the test ends."""
    made: list[TritonServer] = []

    def make(*models: str, **options: Any) -> TritonServer:
        made.append(TritonServer(models, repository=repository, http_port=0, grpc_port=0, metrics_port=0, **options))
        return made[-1]

    yield make
    for server in made:
        server.kill()


def ask(server: TritonServer, model: str, text: str = "hello") -> str:
    url = f"http://{server.http_url}/v2/models/{model}/generate"
    with urllib.request.urlopen(url, data=json.dumps({"text_input": text}).encode(), timeout=10) as answer:
        return str(json.load(answer)["text_output"])


def wait_until(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def living(pids: list[int]) -> list[int]:
    """Those of `pids` that still run; one that has ended and was not yet reaped does not."""
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            pass
    return found


@pytest.mark.server
def test_a_stopped_server_leaves_no_process_no_folder_and_no_shared_memory(make_server: Any) -> None:
    server = make_server("echo", "outliver")
    server.start()
    pids, folder = server.process_ids(), server.runtime_dir.parent
    regions = [Path("/dev/shm", stub.region) for stub in living_stubs(server.pid)]
    assert [region.exists() for region in regions] == [True, True]
    assert ask(server, "echo", "hello") == "hello"
    # tritonserver, two stubs, and the child with a session of its own that one of them started
    assert len(pids) == 4
    assert server.pid in pids
    server.stop()
    assert living(pids) == []
    assert not folder.exists()
    assert [region.exists() for region in regions] == [False, False]
    assert not server.running


@pytest.mark.server
def test_models_run_in_this_interpreter_with_the_options_in_their_environment(
    make_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "language_model").mkdir()
    (tmp_path / "language_model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    server = make_server("facts", model="./language_model", device="cpu", environment={"EXTRA": "1"})
    server.start()
    facts = json.loads(ask(server, "facts"))
    environment = facts["environment"]
    assert facts["prefix"] == sys.prefix
    assert environment["SLIPSTREAM_MODEL"] == str(tmp_path / "language_model")
    assert environment["SLIPSTREAM_DEVICE"] == "cpu"
    assert environment["SLIPSTREAM_RUNTIME_DIR"] == str(server.runtime_dir) == facts["folder"]
    assert environment["EXTRA"] == "1"
    assert server.runtime_dir.stat().st_mode & 0o777 == 0o700
    assert facts["session"] != os.getsid(0)


@pytest.mark.server
def test_stop_drains_all_engines_at_once_while_the_server_still_runs(make_server: Any) -> None:
    server = make_server("echo")
    server.start()
    together = threading.Barrier(2, timeout=10)
    messages = []

    def drain(message: dict[str, Any]) -> dict[str, Any]:
        together.wait()  # passes only if both engines are asked at the same time
        messages.append((message, ask(server, "echo", "still there")))
        return {"type": "drained", "finished": 1, "aborted": 0}

    for name in ("first", "second"):
        FakeEngine(server.runtime_dir, name, drain)
    server.stop(drain_seconds=7)
    assert messages == [({"type": "drain", "timeout_s": 7}, "still there")] * 2


@pytest.mark.server
def test_a_killed_owner_takes_the_server_with_it(repository: Path) -> None:
    script = (
        "import json, sys, time; from pathlib import Path\n"
        "from slipstream_client.server.tritonserver import TritonServer\n"
        "server = TritonServer(['echo'], repository=Path(sys.argv[1]), http_port=0, grpc_port=0, metrics_port=0)\n"
        "server.start(); print(json.dumps(server.process_ids()), flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", script, str(repository)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pids = json.loads(owner.stdout.readline())
    assert living(pids) == pids
    owner.kill()
    owner.communicate()
    assert wait_until(lambda: living(pids) == [])


@pytest.mark.server
def test_a_server_outlives_the_thread_that_started_it(make_server: Any) -> None:
    server = make_server("echo")
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    assert ask(server, "echo", "hello") == "hello"


@pytest.mark.server
def test_a_model_whose_process_died_is_found_and_loaded_again(make_server: Any) -> None:
    server = make_server("echo", "facts")
    server.start()
    assert server.dead_models() == []
    (stub,) = (pid for pid in server.process_ids() if "echo_0_0" in psutil.Process(pid).cmdline())
    os.kill(stub, signal.SIGKILL)
    assert wait_until(lambda: server.dead_models() == ["echo"])
    server.reload("echo")
    assert server.dead_models() == []
    assert ask(server, "echo", "again") == "again"


@pytest.mark.server
def test_a_model_that_does_not_load_is_explained_in_one_line(make_server: Any) -> None:
    server = make_server("echo", "broken")
    with pytest.raises(ServerError) as failure:
        server.start()
    log = server.log_path
    assert str(failure.value) == f"broken: ValueError: the weights are missing (log: {log})"
    assert "TRITONBACKEND_ModelInstanceInitialize" in log.read_text()
    log.unlink()
    assert server.process_ids() == []


@pytest.mark.server
def test_a_server_that_ends_while_starting_is_reported_at_once(make_server: Any, tmp_path: Path) -> None:
    server = make_server("ends_server", log_path=tmp_path / "log")
    began = time.monotonic()
    with pytest.raises(ServerError, match=r"tritonserver ended while starting: killed by SIGKILL \(log: .*/log\)"):
        server.start()
    assert time.monotonic() - began < 15
    assert server.process_ids() == []


@pytest.mark.server
def test_a_model_that_is_not_ready_in_time_ends_the_start(make_server: Any, tmp_path: Path) -> None:
    server = make_server("slow", start_timeout_s=1, log_path=tmp_path / "log")
    with pytest.raises(ServerError, match="the models were not ready after 1 seconds"):
        server.start()
    assert server.process_ids() == []


def test_a_taken_port_is_named_with_its_holder_and_the_flag(repository: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        server = TritonServer(["echo"], repository=repository, http_port=0, grpc_port=port, metrics_port=0)
        name = psutil.Process().name()
        expected = rf"port {port} .* taken by {name} \(process {os.getpid()}\); choose another with --grpc-port"
        with pytest.raises(SlipstreamError, match=expected):
            server.start()
    assert server.process_ids() == []


@pytest.mark.parametrize("host", ["nonsense.invalid", "::1", "192.0.2.1"])
def test_a_host_that_nobody_can_listen_at_is_not_called_taken(repository: Path, host: str) -> None:
    for ports in ({"http_port": 8000, "grpc_port": 0, "metrics_port": 0}, dict.fromkeys(("http_port", "grpc_port"), 0)):
        server = TritonServer(["echo"], repository=repository, host=host, **{"metrics_port": 0, **ports})
        with pytest.raises(SlipstreamError, match=f"cannot listen on {host}"):
            server.start()


def test_a_log_that_cannot_be_written_is_named(repository: Path, tmp_path: Path) -> None:
    for path in (tmp_path, Path("/proc/nowhere/log")):
        server = TritonServer(["echo"], repository=repository, http_port=0, grpc_port=0, metrics_port=0, log_path=path)
        with pytest.raises(SlipstreamError, match=f"cannot write the log {path}"):
            server.start()


def test_free_ports_are_distinct_and_outside_of_the_range_of_outgoing_connections() -> None:
    ports = free_ports(20)
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(set(ports)) == 20
    assert all(10_000 <= port < max(lowest, 32_768) for port in ports)


def test_folders_of_owners_that_were_killed_are_removed_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths.tempfile, "tempdir", str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=subprocess.PIPE, text=True)
    left, in_use = (tmp_path / f"slipstream-{pid}-x" for pid in (ended.stdout.strip(), os.getpid()))
    monkeypatch.setattr(paths, "SHARED_MEMORY", tmp_path / "slipstream-other")
    for folder in (left, in_use, tmp_path / "slipstream-other"):
        folder.mkdir()
    for folder in (left, in_use):
        paths.note_regions(folder, [f"region-{folder.name}"])
        (tmp_path / "slipstream-other" / f"region-{folder.name}").touch()
    made = paths.make_server_folder(longest=100)
    assert set(tmp_path.iterdir()) == {made, in_use, tmp_path / "slipstream-other"}
    assert [path.name for path in (tmp_path / "slipstream-other").iterdir()] == [f"region-{in_use.name}"]
    assert made.stat().st_mode & 0o777 == 0o700


def test_a_scratch_folder_goes_with_its_block_or_where_its_owner_was_killed_with_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths.tempfile, "tempdir", str(tmp_path))
    with paths.scratch_folder() as folder:
        made = paths.make_server_folder(longest=100)
        assert set(tmp_path.iterdir()) == {made, folder}
    made.rmdir()
    killed = """
import os
from slipstream_client.server import paths
scratch = paths.scratch_folder()
scratch.__enter__()
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", killed], env=os.environ | {"TMPDIR": str(tmp_path)}, check=False)
    assert len(list(tmp_path.iterdir())) == 1
    made = paths.make_server_folder(longest=100)
    assert list(tmp_path.iterdir()) == [made]


def test_unknown_models_and_folders_without_models_are_refused(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match=r"no model 'eco' in .*; there are broken, echo, "):
        TritonServer(["eco"], repository=repository)
    with pytest.raises(RepositoryError, match=r"no folder with a config\.pbtxt"):
        find_repository(tmp_path)


def test_the_language_model_is_read_from_the_parameters_of_the_config(tmp_path: Path) -> None:
    for name, text in {
        "one": 'parameters { key: "model" value { string_value: "smollm2-135m" } }',
        "two": 'parameters: {\n  key: "model",\n  value: { string_value: "smollm2-135m" }\n}',
        "none": 'parameters { key: "device" value { string_value: "cpu" } }',
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").write_text(text)
    assert language_models(tmp_path, ["one", "two", "none"]) == ["smollm2-135m"]


def test_a_server_on_the_path_wins_over_triton_home_and_both_over_the_embedded_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("path", "home"):
        binary = tmp_path / name / "bin" / "tritonserver"
        binary.parent.mkdir(parents=True)
        binary.touch(mode=0o755)
    (tmp_path / "path" / "backends").mkdir()
    (tmp_path / "path" / "TRITON_VERSION").write_text("2.60.0\n")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "path" / "bin"))
    found = installation.find_tritonserver()
    assert (found.source, found.version, found.backends) == ("$PATH", "2.60.0", tmp_path / "path" / "backends")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installation.find_tritonserver().binary == tmp_path / "home" / "bin" / "tritonserver"
    monkeypatch.delenv("TRITON_HOME")
    monkeypatch.setattr(installation, "embedded_package", lambda: None)
    with pytest.raises(installation.InstallationError, match=r"no tritonserver found .*\[embedded\]"):
        installation.find_tritonserver()


def test_a_python_without_its_shared_library_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation.sysconfig, "get_config_var", lambda name: None)
    monkeypatch.setattr(installation.sys, "base_prefix", "/nowhere")
    with pytest.raises(installation.InstallationError, match=r"no shared library libpython3\.\d+\.so.*apt-get install"):
        installation.find_libpython()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            'E0101 00:00:00.000001 7 main.cc:245] "failed to start GRPC service: Unavailable - Socket in use "',
            "failed to start GRPC service: Unavailable - Socket in use",
        ),
        (
            "E0101 00:00:00.000001 7 model_lifecycle.cc:642] \"failed to load 'a' version 1: Internal: KeyError: 'x'\\n"
            '\\nAt:\\n  model.py(3): initialize\\n"',
            "a: KeyError: 'x'",
        ),
        (
            "E0101 model_lifecycle.cc:642] \"failed to load 'b' version 1: Internal: same\"\n"
            "E0101 model_lifecycle.cc:642] \"failed to load 'a' version 1: Internal: same\"",
            "a, b: same",
        ),
        ('E0101 00:00:00.000001 7 server.cc:241] "CudaDriverHelper has not been initialized."', None),
        ("Error: Failed to initialize NVML", None),
    ],
)
def test_the_reason_of_a_failed_start_is_found_in_the_log(tmp_path: Path, line: str, reason: str | None) -> None:
    log = tmp_path / "log"
    log.write_text(f'error: of an earlier start\nI0101 00:00:00.000000 7 server.cc:1] "fine"\n{line}\n')
    assert failure_reason(log, offset=len("error: of an earlier start\n")) == reason
