"""The engine's configuration: the parameters of a config.pbtxt, overridden by the environment, validated once.

Models and their cache folder have variables of their own, read by the model store.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError

_CHOICES = {
    "policy": ("continuous", "lockstep", "iterative"),
    "device": ("auto", "cpu", "cuda"),
    "weights": ("auto", "fp16", "fp32", "int8", "bf16"),
    "kv_cache_dtype": ("auto", "fp32", "fp16"),
    "executor": ("native", "transformers"),
    "admission": ("optimistic", "no_evict"),
    "queue_order": ("fcfs", "priority", "fair"),
}
# What `auto` is, by device.
DEFAULT_WEIGHTS = {"cpu": "fp16", "cuda": "bf16"}
_LONGEST_NAME = 30
# field -> (least, most) allowed value
_RANGES = {
    "max_num_seqs": (1, 4096),
    "max_num_batched_tokens": (0, 1 << 20),
    "max_model_len": (0, 1 << 24),
    "block_size": (8, 256),
    "kv_cache_bytes": (1, 1 << 46),
    "aging_seconds": (1, 1 << 20),
    "look_past": (0, 1 << 10),
    "long_prefill_token_threshold": (0, 1 << 20),
    "max_queued_requests": (1, 1 << 20),
    "max_queued_tokens": (1, 1 << 32),
    "max_request_seconds": (1, 1 << 20),
    "max_response_bytes": (1 << 16, 1 << 40),
    "threads": (0, 1024),
    "grace_seconds": (0, 3600),
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine process is started with. Doors share an engine only if theirs is equal to the last field.

    Attributes:
        name: the engine's name inside its server's runtime directory.
        policy: who is computed when: `continuous`, `lockstep` (static and dynamic batching) or `iterative`.
        model: a built-in name, a folder in Hugging Face's layout, or a hub id.
        device: `cpu`, `cuda`, or `auto` (cuda where there is one).
        weights: storage of the matmul weights: `fp16`, `fp32` or `int8` packed for a CPU, `bf16` or `fp32` on CUDA;
            `auto` is fp16 on a CPU and bf16 on CUDA.
        kv_cache_dtype: what keys and values are kept as: `fp32`, or `fp16`, half as large and rounded to 11 bits;
            `auto` is fp16 beside the weights fp16 and int8, and fp32 beside fp32. Where torch computes, `auto` alone is
            allowed, which is the weights' own.
        executor: what computes a step: `native`, this project's own model code, or `transformers`, which is its
            `model.generate()` (lockstep policy; without fp16 weights, so that `auto` is fp32 on a CPU).
        max_num_seqs: seats, the most sequences computed in one step.
        max_num_batched_tokens: token budget of one step of the continuous policy; 0 is 512 on a CPU, 8192 on
            CUDA, and no less than max_num_seqs.
        max_model_len: longest prompt plus answer in tokens; 0 is the model's own limit.
        block_size: tokens in one KV block, a multiple of 8, on a CPU of 16.
        kv_cache_bytes: size of the KV pool in bytes.
        admission: `optimistic` (preempts when its forecast was wrong) or `no_evict` (admits only what can finish).
        chunked_prefill: whether a prompt may be spread over several steps.
        prefix_cache: whether requests of the continuous policy share the blocks of equal beginnings.
        queue_order: of the continuous policy, `fcfs` (first come, first served), `priority` (the lowest `priority` of a
            request first, also in place of running ones) or `fair` (each `tenant` gets its weight's share of tokens).
        aging_seconds: under `priority`, the age that is worth one level.
        tenant_weights: under `fair`, as `name=weight` with commas between; other tenants have the weight 1.
        look_past: how many requests may be admitted before the first in the queue while that one lacks blocks (not
            under `priority`).
        long_prefill_token_threshold: the most tokens of one prompt in one step; 0 is the whole budget.
        max_queued_requests, max_queued_tokens: beyond these, requests are refused as unavailable (continuous policy;
            in front of the others Triton has the queue).
        max_request_seconds: no request of the continuous policy takes longer, from its arrival to its end.
        max_response_bytes: the most that the responses of one stream may take in the server, which holds all of them
            where its client does not read (continuous policy); an answer in one response is as long as its fields say.
        threads: CPU threads of the matmuls and kernels; 0 is one per usable core.
        grace_seconds: how long the engine outlives its last door.
    """

    name: str
    policy: str = "continuous"
    model: str = "smollm2-135m"
    device: str = "auto"
    weights: str = "auto"
    kv_cache_dtype: str = "auto"
    executor: str = "native"
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 0
    max_model_len: int = 0
    block_size: int = 16
    kv_cache_bytes: int = 768 << 20
    admission: str = "optimistic"
    chunked_prefill: bool = True
    prefix_cache: bool = True
    queue_order: str = "fcfs"
    aging_seconds: int = 30
    tenant_weights: str = ""
    look_past: int = 0
    long_prefill_token_threshold: int = 0
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 20
    max_request_seconds: int = 3600
    max_response_bytes: int = 64 << 20
    threads: int = 0
    grace_seconds: int = 5

    def __post_init__(self) -> None:
        for field, allowed in _CHOICES.items():
            if getattr(self, field) not in allowed:
                raise ConfigError(f"{field} is {getattr(self, field)!r}; allowed are {', '.join(allowed)}")
        for field, (least, most) in _RANGES.items():
            if not least <= getattr(self, field) <= most:
                raise ConfigError(f"{field} is {getattr(self, field)}; allowed are {least} to {most}")
        if self.block_size % 8:
            raise ConfigError(f"block_size is {self.block_size}; it must be a multiple of 8")
        if 0 < self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; every one of the max_num_seqs = "
                f"{self.max_num_seqs} running sequences needs at least one token a step"
            )
        if self.executor == "transformers":
            if self.policy != "lockstep":
                raise ConfigError(
                    f"executor is 'transformers' and policy is {self.policy!r}; generate() computes whole batches, so "
                    "only the policy 'lockstep' (static and dynamic batching) has it"
                )
            if self.weights in ("fp16", "int8"):
                raise ConfigError(
                    f"weights is {self.weights!r}, a packed storage that only the executor 'native' computes with; "
                    "allowed beside executor 'transformers' are auto, fp32, bf16"
                )
        _ = self.weight_of_tenant  # is it readable?
        if not 1 <= len(self.name.encode()) <= _LONGEST_NAME:
            raise ConfigError(
                f"name is {self.name!r}; an engine's name has 1 to {_LONGEST_NAME} bytes, since its sockets' "
                "paths are bounded (the parameter `name` gives a model's engine another one)"
            )
        if not self.model:
            raise ConfigError("model is empty; it must be a built-in name, a folder or a hub id")

    @property
    def weight_of_tenant(self) -> dict[str, float]:
        """`tenant_weights` by name.

        Raises:
            ConfigError: it is no list of `name=weight`.
        """
        weights: dict[str, float] = {}
        for entry in filter(None, (part.strip() for part in self.tenant_weights.split(","))):
            name, _, number = entry.rpartition("=")
            try:
                weight = float(number)
            except ValueError:
                weight = math.nan
            if not name or not 0.001 <= weight <= 1e6:
                raise ConfigError(
                    f"tenant_weights has {entry!r}; it must be name=weight with commas between, weights 0.001 to 1e6"
                )
            weights[name] = weight
        return weights

    @property
    def fingerprint(self) -> str:
        """Hash of all fields: two doors share an engine only with equal fingerprints."""
        return hashlib.sha256(repr(dataclasses.astuple(self)).encode()).hexdigest()[:16]

    @classmethod
    def from_parameters(
        cls, parameters: Mapping[str, str], environment: Mapping[str, str] = os.environ
    ) -> EngineConfig:
        """Build from config.pbtxt `parameters`; `SLIPSTREAM_<FIELD>` in the environment wins over a parameter.

        Raises:
            ConfigError: an unknown parameter, a value of the wrong type, or one outside its range.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(set(parameters) - set(fields))
        if unknown:
            raise ConfigError(f"unknown parameter {unknown[0]!r}; known are {', '.join(fields)}")
        values = dict(parameters)
        for field in fields:
            override = environment.get(f"SLIPSTREAM_{field.upper()}")
            if override and field not in ("name", "policy"):
                values[field] = override
        return cls(**{key: _convert(key, str(fields[key].type), value) for key, value in values.items()})


def _convert(field: str, kind: str, value: str) -> Any:
    text = value.strip()
    if kind == "int":
        try:
            return int(text)
        except ValueError:
            raise ConfigError(f"{field} is {value!r}; it must be a whole number") from None
    return read_bool(field, text) if kind == "bool" else text


def usable_threads() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def read_bool(field: str, value: str) -> bool:
    """Read a parameter that is true or false.

    Raises:
        ConfigError: it is neither.
    """
    if value.strip().lower() not in ("true", "false"):
        raise ConfigError(f"{field} is {value!r}; it must be true or false")
    return value.strip().lower() == "true"


def runtime_directory(environment: Mapping[str, str] = os.environ, server_pid: int | None = None) -> Path:
    """The private directory in which one server's engines meet its doors, created if missing.

    It is `$SLIPSTREAM_RUNTIME_DIR`, or named after the server's process (id and start time), so that two servers never
    share an engine.

    Raises:
        ConfigError: the directory is not this user's own, or its path is too long for a Unix socket.
    """
    explicit = environment.get("SLIPSTREAM_RUNTIME_DIR")
    if explicit:
        directory = Path(explicit)
    else:
        base = Path(environment.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
        pid = server_pid or os.getppid()
        user_directory = base / f"slipstream-{os.getuid()}"
        user_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if user_directory.stat().st_uid != os.getuid():
            raise ConfigError(f"{user_directory} belongs to another user; set SLIPSTREAM_RUNTIME_DIR")
        # Whoever may write here could put sockets of their own in place of an engine's.
        user_directory.chmod(0o700)
        _remove_leftovers(user_directory)
        directory = user_directory / f"{pid}-{_start_time(pid)}"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(f"runtime directory {directory} must belong to this user alone (mode 0700)")
    if len(str(directory)) > 70:
        raise ConfigError(f"runtime directory {directory} is too long for a Unix socket: at most 70 characters")
    return directory


def _remove_leftovers(user_directory: Path) -> None:
    """Remove the directories of servers that are gone."""
    for directory in user_directory.glob("*-*"):
        pid, _, start_time = directory.name.partition("-")
        if pid.isdigit() and (not Path(f"/proc/{pid}").exists() or _start_time(int(pid)) != start_time):
            shutil.rmtree(directory, ignore_errors=True)


def _start_time(pid: int) -> str:
    """Start of a process in clock ticks since boot, field 22 of /proc/PID/stat (man 5 proc)."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[19]
