"""The machine and the software of a comparison, without names of hosts, users or folders."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from slipstream_client.tensors import ModelContract

PACKAGES = ("slipstream-triton", "tritonclient", "nvidia-pytriton", "numpy", "torch", "transformers", "numba", "triton")
ENGINE_PARAMETERS = ("model", "device", "weights", "max_num_seqs", "kv_cache_bytes", "block_size")
DEMO_MODEL = "smollm2-135m"
DEMO_MODEL_NOTE = "The weights are de-quantised from Q4_1: answers are not those of the original model."


def describe_environment() -> dict[str, Any]:
    """What is known without a server: processor, cores, memory, platform, versions, commit."""
    return {
        "cpu": processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "platform": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver()).strip() or 'no libc'}",
        "python": platform.python_version(),
        "packages": _versions(),
        "commit": commit(),
    }


def describe_server(
    contracts: Sequence[ModelContract], server: str, model: str | None = None, device: str | None = None
) -> dict[str, Any]:
    """What the models' configurations say: one value where all agree, else one for each model.

    `server` names the inference server and its version; `model` is what it was started with instead of what the
    configurations say, and `device` what its engines found.
    """
    engine: dict[str, Any] = {}
    for key in ENGINE_PARAMETERS:
        values = {contract.name: contract.parameters.get(key) for contract in contracts}
        distinct = set(values.values())
        if distinct != {None}:
            engine[key] = distinct.pop() if len(distinct) == 1 else values
    if model is not None:
        engine["model"] = model
    if device is not None:
        engine["device"] = device
    if isinstance(engine.get("model"), str):
        engine["model"] = Path(engine["model"]).name  # a folder's own name tells which model; where it lies does not
    described = {"server": server, "engine": engine}
    return described | {"model_note": DEMO_MODEL_NOTE} if engine.get("model") == DEMO_MODEL else described


def processor_name() -> str:
    """The processor as it names itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def commit() -> str | None:
    """The commit of the checkout that this package lies in, marked where files differ from it; None elsewhere."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # an install inside some other checkout is not ours
        revision = git("rev-parse", "HEAD")
        return f"{revision} with changes" if git("status", "--porcelain", "--untracked-files=no") else revision
    except (OSError, subprocess.SubprocessError):
        return None


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
