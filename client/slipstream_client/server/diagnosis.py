"""What `slipstream serve` needs on this machine, what is there, and what mends what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement

from slipstream_client.server.installation import (
    DISTRIBUTION,
    InstallationError,
    find_libpython,
    find_tritonserver,
    install_command,
)
from slipstream_client.server.model_repository import RepositoryError, find_repository, list_models
from slipstream_client.server.paths import cache_folder
from slipstream_client.server.ports import holder_of, is_free

_DEFAULT_PORTS = {8000: "--http-port", 8001: "--grpc-port", 8002: "--metrics-port"}
_MIB = 1 << 20
_GIB = 1 << 30
# Each model instance starts with 1 MiB and takes more for large tensors.
_SHARED_MEMORY_BYTES = 32 * _MIB
# Five models run four engines: 1.4 GiB of resident memory each, and a KV pool of up to 0.75 GiB.
_MEMORY_BYTES = 8 * _GIB


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `missing` means that `serve` cannot work; a `note` only limits it."""

    topic: str
    status: Literal["ok", "note", "missing"]
    found: str
    mend: str = ""


def diagnose() -> Iterator[Finding]:
    """Look at everything, in the order in which it would be put right; imports torch if it is there."""
    yield _python()
    yield from _server()
    yield from _packages()
    yield _repository()
    yield from _devices()
    yield _models()
    yield _ports()
    yield _shared_memory()
    yield _memory()


def _python() -> Finding:
    supported = (3, 10) <= sys.version_info[:2] < (3, 13)
    found = f"{sys.version.split()[0]}, {sys.executable}"
    if supported:
        return Finding("Python", "ok", found)
    return Finding("Python", "missing", found, "make the environment with Python 3.10, 3.11 or 3.12")


def _server() -> Iterator[Finding]:
    try:
        server = find_tritonserver()
    except InstallationError as error:
        text, _, command = str(error).partition("; install NVIDIA's binary with: ")
        yield Finding("tritonserver", "missing", text, command)
        return
    version = server.version or "version unknown until it runs"
    yield Finding("tritonserver", "ok", f"{version}, {server.binary} (from {server.source})")
    try:
        yield Finding("libpython", "ok", str(find_libpython()))
    except InstallationError as error:
        # A server that was installed for itself brings the library that its own stub needs.
        yield Finding("libpython", "missing" if server.embedded else "note", *str(error).split("; ", 1))
    if server.embedded:
        yield _embedded_numpy()


def _embedded_numpy() -> Finding:
    numpy = importlib.metadata.version("numpy")
    if int(numpy.split(".")[0]) < 2:
        return Finding("numpy", "ok", f"{numpy}, below 2 as the embedded server's Python stub needs it")
    found = f"{numpy}: the embedded server's Python stub aborts on text with numpy 2"
    return Finding("numpy", "missing", found, install_command("embedded"))


def _packages() -> Iterator[Finding]:
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("packages", "missing", f"{DISTRIBUTION} is not installed", "pip install -e '.[server,embedded]'")
        return
    requirements = [Requirement(line) for line in lines]
    for extra in ("", "server", "embedded", "dev"):
        wanted = [each for each in requirements if _belongs_to(each, extra)]
        present: list[str] = []
        absent: list[str] = []
        for requirement in wanted:
            try:
                version = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                absent.append(requirement.name)
                continue
            if requirement.specifier.contains(version, prereleases=True):
                present.append(f"{requirement.name} {version}")
            else:
                absent.append(f"{requirement.name}{requirement.specifier} (there is {version})")
        topic = f"packages [{extra}]" if extra else "packages"
        if not absent:
            yield Finding(topic, "ok", ", ".join(present))
            continue
        # Without the extra `embedded` another tritonserver may be there, which is looked at above.
        status: Literal["note", "missing"] = "missing" if extra in ("", "server") else "note"
        yield Finding(topic, status, f"missing: {', '.join(absent)}", install_command(extra or "server"))


def _belongs_to(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    applies = marker is None or marker.evaluate({"extra": extra})
    always = marker is None or marker.evaluate({"extra": ""})
    return applies and (not extra or not always)


def _repository() -> Finding:
    try:
        repository = find_repository()
    except RepositoryError as error:
        return Finding("model repository", "missing", str(error), "export SLIPSTREAM_REPOSITORY=DIR")
    return Finding("model repository", "ok", f"{', '.join(list_models(repository))} in {repository}")


def _devices() -> Iterator[Finding]:
    cards = _nvidia_smi()
    if importlib.util.find_spec("torch") is None:
        if cards:
            yield Finding("GPU", "note", f"{cards}; torch, which would use it, is missing", install_command("server"))
        return
    try:
        import torch
    except (ImportError, OSError) as error:  # a shared library that it needs
        yield Finding("device", "missing", f"torch cannot be imported: {error}", install_command("server"))
        return
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        yield Finding("GPU", "ok", f"{names}; CUDA {torch.version.cuda}")
        yield Finding("device", "ok", "auto runs on cuda: bf16 weights")
        return
    if cards:
        build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "a build for the CPU only"
        mend = "install a torch build for CUDA, or a driver that fits it"
        yield Finding("GPU", "note", f"{cards}, but torch {torch.__version__} ({build}) cannot use it", mend)
    else:
        yield Finding("GPU", "ok", "none; none is needed")
    cores = len(os.sched_getaffinity(0))
    capability = torch.backends.cpu.get_cpu_capability()
    yield Finding("device", "ok", f"auto runs on cpu: {cores} cores, {capability}, fp16-packed weights")


def _nvidia_smi() -> str:
    """Names of the cards that the driver sees; empty without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return "; ".join(answer.stdout.split("\n")[:-1])


def _models() -> Finding:
    folder = cache_folder() / "models"
    # The server side may be absent; what it has pulled is known by its folder all the same.
    pulled = sorted(path.parent.name for path in folder.glob("[!.]*/config.json"))
    if not pulled:
        found = f"none in {folder} yet; serve fetches the built-in one"
        return Finding("language models", "note", found, "slipstream model pull smollm2-135m")
    return Finding("language models", "ok", f"{', '.join(pulled)} in {folder}")


def _ports() -> Finding:
    taken = [port for port in _DEFAULT_PORTS if not is_free(port)]
    if not taken:
        return Finding("ports", "ok", f"{', '.join(map(str, _DEFAULT_PORTS))} are free")
    holders = ", ".join(f"{port} is taken by {holder_of(port) or 'another program'}" for port in taken)
    return Finding("ports", "note", holders, f"choose others with {', '.join(_DEFAULT_PORTS[port] for port in taken)}")


def _shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding("/dev/shm", "missing", "not there; Triton's Python backend needs it", "mount a tmpfs there")
    free = psutil.disk_usage(str(folder)).free
    found = f"{free / _MIB:.0f} MiB free"
    if free < _SHARED_MEMORY_BYTES:
        return Finding("/dev/shm", "missing", found, "give a container --shm-size=256m, or remount it larger")
    return Finding("/dev/shm", "ok", found)


def _memory() -> Finding:
    free = psutil.virtual_memory().available
    limit = _cgroup_limit()
    found = f"{min(free, limit or free) / _GIB:.1f} GiB available"
    if min(free, limit or free) < _MEMORY_BYTES:
        return Finding("memory", "note", f"{found}, little for all models", "slipstream serve --models continuous")
    return Finding("memory", "ok", found)


def _cgroup_limit() -> int | None:
    """The container's memory limit in bytes; None without one."""
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
