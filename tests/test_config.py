"""Configuration: validated once, overridden by the environment; and who may import what."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.config import EngineConfig, runtime_directory
from slipstream.errors import ConfigError


def refusal(**fields: Any) -> str:
    with pytest.raises(ConfigError) as error:
        EngineConfig(name="e", **fields)
    return str(error.value)


# --- values


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("policy", "static", "continuous, lockstep, iterative"),
        ("device", "tpu", "auto, cpu, cuda"),
        ("weights", "int4", "auto, fp16, fp32, int8, bf16"),
        ("executor", "onnx", "native, transformers"),
        ("admission", "greedy", "optimistic, no_evict"),
        ("max_num_seqs", 0, "1 to 4096"),
        ("max_num_seqs", 4097, "1 to 4096"),
        ("max_num_batched_tokens", -1, "0 to 1048576"),
        ("max_model_len", -1, "0 to 16777216"),
        ("block_size", 0, "8 to 256"),
        ("block_size", 512, "8 to 256"),
        ("kv_cache_bytes", 0, "1 to 70368744177664"),
        ("max_queued_requests", 0, "1 to 1048576"),
        ("max_queued_tokens", 0, "1 to 4294967296"),
        ("threads", -1, "0 to 1024"),
        ("grace_seconds", -1, "0 to 3600"),
        ("grace_seconds", 3601, "0 to 3600"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_field_and_what_is_allowed(
    field: str, value: Any, allowed: str
) -> None:
    assert refusal(**{field: value}) == f"{field} is {value!r}; allowed are {allowed}"


def test_fields_that_depend_on_each_other_are_checked_together() -> None:
    assert refusal(block_size=12) == "block_size is 12; it must be a multiple of 8"
    assert refusal(model="").startswith("model is empty")
    text = refusal(max_num_batched_tokens=8, max_num_seqs=9)
    assert "max_num_batched_tokens is 8" in text
    assert "max_num_seqs = 9" in text
    assert EngineConfig(name="e", max_num_batched_tokens=9, max_num_seqs=9).max_num_seqs == 9
    assert EngineConfig(name="e", max_num_batched_tokens=0, max_num_seqs=200).max_num_seqs == 200


@pytest.mark.parametrize("policy", ["continuous", "iterative"])
def test_generate_is_refused_where_no_whole_batches_are_computed(policy: str) -> None:
    assert refusal(policy=policy, executor="transformers") == (
        f"executor is 'transformers' and policy is '{policy}'; generate() computes whole batches, so only the policy "
        "'lockstep' (static and dynamic batching) has it"
    )


def test_generate_is_refused_with_weights_that_only_the_native_executor_has() -> None:
    assert refusal(policy="lockstep", executor="transformers", weights="fp16").startswith("weights is 'fp16', a packed")
    for weights in ("auto", "fp32", "bf16"):
        config = EngineConfig(name="e", policy="lockstep", executor="transformers", weights=weights)
        assert (config.executor, config.weights) == ("transformers", weights)


def test_the_defaults_are_valid_and_frozen() -> None:
    config = EngineConfig(name="e")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.threads = 3  # type: ignore[misc]


def test_the_fingerprint_tells_any_two_configurations_apart() -> None:
    config = EngineConfig(name="e", policy="lockstep")
    changes: dict[str, Any] = {
        "name": "f", "policy": "continuous", "model": "other", "device": "cpu", "weights": "fp32",
        "kv_cache_dtype": "fp16",
        "executor": "transformers", "max_num_seqs": 3, "max_num_batched_tokens": 99, "max_model_len": 9,
        "block_size": 8, "kv_cache_bytes": 5, "admission": "no_evict", "chunked_prefill": False, "prefix_cache": False,
        "queue_order": "fair", "aging_seconds": 1, "tenant_weights": "a=2", "look_past": 1,
        "long_prefill_token_threshold": 1, "max_queued_requests": 1, "max_queued_tokens": 1, "max_request_seconds": 1,
        "max_response_bytes": 1 << 20, "threads": 1, "grace_seconds": 1,
    }  # fmt: skip
    assert set(changes) == {field.name for field in dataclasses.fields(EngineConfig)}
    prints = {dataclasses.replace(config, **{field: value}).fingerprint for field, value in changes.items()}
    assert len(prints | {config.fingerprint}) == len(changes) + 1
    assert EngineConfig(name="e", policy="lockstep").fingerprint == config.fingerprint


# --- parameters of config.pbtxt and the environment


def test_parameters_are_text_and_become_values() -> None:
    config = EngineConfig.from_parameters(
        {"name": "e", "max_num_seqs": " 4 ", "chunked_prefill": "False", "model": "m", "kv_cache_bytes": "1024"}, {}
    )
    assert config == EngineConfig(name="e", max_num_seqs=4, chunked_prefill=False, model="m", kv_cache_bytes=1024)


def test_the_environment_wins_over_parameters() -> None:
    environment = {
        "SLIPSTREAM_MODEL": "/models/mine",
        "SLIPSTREAM_DEVICE": "cpu",
        "SLIPSTREAM_MAX_NUM_SEQS": "7",
        "SLIPSTREAM_CHUNKED_PREFILL": "false",
        "SLIPSTREAM_THREADS": "",
        "SLIPSTREAM_UNKNOWN": "ignored, as it may be a client's",
    }
    config = EngineConfig.from_parameters({"name": "e", "max_num_seqs": "4", "model": "m", "threads": "2"}, environment)
    assert (config.model, config.device, config.max_num_seqs) == ("/models/mine", "cpu", 7)
    assert config.chunked_prefill is False
    assert config.threads == 2


def test_what_makes_a_model_itself_cannot_be_overridden_for_all_models_at_once() -> None:
    environment = {"SLIPSTREAM_NAME": "x", "SLIPSTREAM_POLICY": "lockstep"}
    config = EngineConfig.from_parameters({"name": "e", "policy": "iterative"}, environment)
    assert (config.name, config.policy) == ("e", "iterative")


@pytest.mark.parametrize(
    ("parameters", "environment", "reason"),
    [
        ({"max_seqs": "4"}, {}, "unknown parameter 'max_seqs'; known are name, policy, model"),
        ({"threads": "two"}, {}, "threads is 'two'; it must be a whole number"),
        ({"threads": "1.5"}, {}, "threads is '1.5'; it must be a whole number"),
        ({"chunked_prefill": "1"}, {}, "chunked_prefill is '1'; it must be true or false"),
        ({}, {"SLIPSTREAM_BLOCK_SIZE": "big"}, "block_size is 'big'; it must be a whole number"),
        ({}, {"SLIPSTREAM_DEVICE": "gpu"}, "device is 'gpu'; allowed are auto, cpu, cuda"),
    ],
)
def test_bad_text_is_refused_with_the_field_and_the_value(
    parameters: dict[str, str], environment: dict[str, str], reason: str
) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig.from_parameters({"name": "e", **parameters}, environment)
    assert str(error.value).startswith(reason)


# --- the runtime directory


def test_the_runtime_directory_is_made_private(short: Path) -> None:
    directory = runtime_directory({"SLIPSTREAM_RUNTIME_DIR": str(short / "run")})
    assert directory == short / "run"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert runtime_directory({"SLIPSTREAM_RUNTIME_DIR": str(directory)}) == directory


def test_each_server_process_has_a_directory_of_its_own(short: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": str(short)}
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            ours, theirs = (runtime_directory(environment, pid) for pid in (os.getpid(), other.pid))
            assert ours != theirs
            assert runtime_directory(environment, os.getpid()) == ours
            assert ours.parent == theirs.parent == short / f"slipstream-{os.getuid()}"
            assert ours.name.startswith(f"{os.getpid()}-")
            assert {path.stat().st_mode & 0o777 for path in (ours, ours.parent)} == {0o700}
        finally:
            other.kill()


def test_directories_of_servers_that_are_gone_are_removed(short: Path) -> None:
    """Also that of an earlier process which had the pid of a living one; others' folders are left alone."""
    environment = {"XDG_RUNTIME_DIR": str(short)}
    ours = runtime_directory(environment, os.getpid())
    gone = [ours.parent / "99999999-123", ours.parent / f"{os.getpid()}-1"]
    kept = ours.parent / "not-a-server"
    for directory in (*gone, kept):
        directory.mkdir()
        (directory / "continuous.log").touch()
    assert runtime_directory(environment, os.getpid()) == ours
    assert sorted(ours.parent.iterdir()) == sorted([ours, kept])


def test_a_directory_that_others_may_enter_is_refused(short: Path) -> None:
    (short / "run").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match=r"must belong to this user alone \(mode 0700\)"):
        runtime_directory({"SLIPSTREAM_RUNTIME_DIR": str(short / "run")})


def test_a_users_directory_that_others_may_write_to_is_closed_to_them(short: Path) -> None:
    (short / f"slipstream-{os.getuid()}").mkdir()
    (short / f"slipstream-{os.getuid()}").chmod(0o777)
    assert runtime_directory({"XDG_RUNTIME_DIR": str(short)}).parent.stat().st_mode & 0o777 == 0o700


def test_a_directory_of_another_user_is_refused(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime_directory({"XDG_RUNTIME_DIR": str(short)})
    other = os.getuid() + 1
    (short / f"slipstream-{other}").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(ConfigError, match="belongs to another user; set SLIPSTREAM_RUNTIME_DIR"):
        runtime_directory({"XDG_RUNTIME_DIR": str(short)})
    with pytest.raises(ConfigError, match="must belong to this user alone"):
        runtime_directory({"SLIPSTREAM_RUNTIME_DIR": str(short)})


def test_a_directory_too_long_for_a_socket_is_refused(short: Path) -> None:
    with pytest.raises(ConfigError, match="is too long for a Unix socket: at most 70 characters"):
        runtime_directory({"SLIPSTREAM_RUNTIME_DIR": str(short / ("x" * 70))})


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path, as sockets need it."""
    with tempfile.TemporaryDirectory(prefix="s-") as folder:
        yield Path(folder)


# --- imports


def modules_after(imports: str) -> set[str]:
    """What is loaded in a fresh interpreter after that import."""
    code = f"{imports}; import sys; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in result.stdout.split()}


@pytest.mark.parametrize(
    "module",
    [
        "slipstream.config",
        "slipstream.engine.request",
        "slipstream.engine.block_pool",
        "slipstream.engine.admission",
        "slipstream.engine.scheduler",
        "slipstream.engine.records",
        "slipstream.engine.messages",
        "slipstream.engine.link",
        "slipstream.batchers.lockstep",
        "slipstream.batchers.iterative",
        "slipstream.doors.fields",
        "slipstream.doors.collector",
    ],
)
def test_schedulers_and_what_doors_share_import_no_model_code(module: str) -> None:
    """Neither torch nor Triton: a scheduler runs in simulation, and a door's process stays small."""
    heavy = {"torch", "transformers", "numba", "triton", "triton_python_backend_utils"}
    assert not modules_after(f"import {module}") & heavy


@pytest.mark.parametrize("package", ["engine", "models", "batchers"])
def test_only_doors_know_of_triton(package: str) -> None:
    """Also in what they import late."""
    sources = sorted((Path(slipstream.__file__).parent / package).rglob("*.py"))
    assert len(sources) > 2
    assert [source for source in sources if "import triton_python_backend_utils" in source.read_text()] == []


def test_the_engine_process_starts_before_the_model_code_is_loaded() -> None:
    """It answers `loading` on its control socket meanwhile."""
    assert "torch" not in modules_after("import slipstream.engine.process")
