"""`slipstream doctor`: honest about what is there, and whole without the server side's packages."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from slipstream_client.commands.doctor import doctor
from slipstream_client.server import diagnosis, installation
from slipstream_client.server.diagnosis import Finding, diagnose
from tiny_repository import write_repository

app = typer.Typer()
app.command()(doctor)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    repository = write_repository(tmp_path / "repository")
    monkeypatch.setenv("SLIPSTREAM_REPOSITORY", str(repository))
    return repository


def findings() -> dict[str, Finding]:
    return {finding.topic: finding for finding in diagnose()}


def test_a_machine_that_can_serve_is_told_so_with_exit_code_0(repository: Path) -> None:
    result = CliRunner().invoke(app, ["--json"])
    answer = json.loads(result.stdout)
    found = {finding["topic"]: finding for finding in answer["findings"]}
    assert (result.exit_code, answer["serve_works"]) == (0, True)
    assert found["Python"]["found"].endswith(sys.executable)
    assert f"torch {metadata.version('torch')}" in found["packages [server]"]["found"]
    assert str(repository) in found["model repository"]["found"]
    assert found["device"]["found"].startswith("auto runs on c")


def test_without_a_tritonserver_the_command_that_installs_one_is_printed(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "embedded_package", lambda: None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("TRITON_HOME", raising=False)
    result = CliRunner().invoke(app)
    assert result.exit_code == 1
    assert f"tritonserver: {installation.install_command('embedded')}\n" in result.stdout
    assert result.stdout.endswith("`slipstream serve` cannot run here yet.\n")


def test_it_runs_with_the_base_install_alone(repository: Path) -> None:
    absent = ["torch", "transformers", "numba", "slipstream", "pytriton"]
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
        "from slipstream_client.server.diagnosis import diagnose\n"
        "print([finding.topic for finding in diagnose()])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stderr == ""
    assert "'tritonserver', 'packages', 'packages [server]'" in result.stdout


def test_missing_packages_are_named_by_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["numpy>=1.26", "psutil>=999", "numba-nothing; extra == 'server'", "no-such-tool>=1; extra == 'dev'"]
    monkeypatch.setattr(diagnosis.importlib.metadata, "requires", lambda _name: lines)
    found = {finding.topic: finding for finding in diagnosis._packages()}
    assert found["packages"].status == "missing"
    assert found["packages"].found == f"missing: psutil>=999 (there is {metadata.version('psutil')})"
    assert found["packages [server]"].status == "missing"
    assert found["packages [server]"].mend == installation.install_command("server")
    assert found["packages [dev]"] == Finding(
        "packages [dev]", "note", "missing: no-such-tool", installation.install_command("dev")
    )


def test_numpy_2_is_refused_for_the_embedded_server_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"numpy": "2.1.0", installation.EMBEDDED_PACKAGE: "0.7.0"}
    monkeypatch.setattr(diagnosis.importlib.metadata, "version", lambda name: versions[name])
    embedded: Any = SimpleNamespace(version="1", binary="b", source="s", embedded=True)
    installed: Any = SimpleNamespace(version="1", binary="b", source="s", embedded=False)
    for server, topics in ((embedded, {"numpy": "missing"}), (installed, {})):
        monkeypatch.setattr(diagnosis, "find_tritonserver", lambda server=server: server)
        found = {each.topic: each.status for each in diagnosis._server() if each.topic == "numpy"}
        assert found == topics


def test_the_install_command_names_the_checkout_only_for_an_editable_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def install_from(origin: dict[str, Any] | None) -> str:
        text = None if origin is None else json.dumps(origin)
        monkeypatch.setattr(
            installation.importlib.metadata, "distribution", lambda _name: SimpleNamespace(read_text=lambda _file: text)
        )
        return installation.install_command("server").removeprefix(sys.executable)

    editable = {"url": "file:///some%20where/slipstream", "dir_info": {"editable": True}}
    assert install_from(editable) == " -m pip install -e '/some where/slipstream[server]'"
    assert install_from(None) == " -m pip install 'slipstream-triton[server]'"
