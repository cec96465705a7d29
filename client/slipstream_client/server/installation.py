"""Find a tritonserver on this machine, and what must be true for it to run Python models with this interpreter.

Looked for in this order: `tritonserver` on $PATH, `$TRITON_HOME/bin`, then the binary that the wheel `nvidia-pytriton`
carries (the extra `embedded`). Only that wheel's files are used, its Python interface is never imported.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shlex
import shutil
import sys
import sysconfig
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from slipstream_client.errors import SlipstreamError

DISTRIBUTION = "slipstream-triton"
EMBEDDED_PACKAGE = "nvidia-pytriton"
# The wheel does not say which server release it carries; `tritonserver` itself has no --version either.
_EMBEDDED_RELEASES = {"0.7.0": "2.51.0 (release 24.10)"}
PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


class InstallationError(SlipstreamError):
    """No tritonserver can run here; the message names what is missing and what mends it."""


@dataclass(frozen=True)
class Installation:
    """A tritonserver that was found."""

    binary: Path
    source: str  # "$PATH", "$TRITON_HOME" or the embedded package's name
    version: str | None  # of the server, where it can be told without starting it
    backends: Path | None  # None: the folder compiled into the binary
    libraries: tuple[Path, ...] = ()  # folders that LD_LIBRARY_PATH must hold
    stub: Path | None = None  # the Python backend's stub for this interpreter, when it lies apart from `backends`

    @property
    def embedded(self) -> bool:
        return self.source == EMBEDDED_PACKAGE


def find_tritonserver() -> Installation:
    """The tritonserver to use.

    Raises:
        InstallationError: there is none, or the embedded one does not fit this interpreter.
    """
    on_path = shutil.which("tritonserver")
    if on_path:
        return _installed(Path(on_path).resolve(), "$PATH")
    home = os.environ.get("TRITON_HOME")
    if home and (Path(home) / "bin" / "tritonserver").is_file():
        return _installed(Path(home).resolve() / "bin" / "tritonserver", "$TRITON_HOME")
    package = embedded_package()
    if package is not None:
        return _embedded(package)
    raise InstallationError(
        "no tritonserver found on $PATH, in $TRITON_HOME/bin or in this Python environment; "
        f"install NVIDIA's binary with: {install_command('embedded')}"
    )


def install_command(extra: str) -> str:
    """The command that adds one of this project's extras to this Python environment, from where it was installed."""
    try:
        origin = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        origin = None
    source = json.loads(origin) if origin else {}
    if source.get("dir_info", {}).get("editable"):
        folder = urllib.parse.unquote(urllib.parse.urlparse(source["url"]).path)
        return f"{shlex.quote(sys.executable)} -m pip install -e {shlex.quote(f'{folder}[{extra}]')}"
    return f"{shlex.quote(sys.executable)} -m pip install {shlex.quote(f'{DISTRIBUTION}[{extra}]')}"


def embedded_package() -> Path | None:
    """The folder of the package that carries tritonserver, found without importing it; None if it is not installed."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        return None
    package = Path(next(iter(spec.submodule_search_locations)))
    return package if (package / "tritonserver" / "bin" / "tritonserver").is_file() else None


def lay_out_backends(installation: Installation, folder: Path) -> Path | None:
    """The backend directory to give to the server, made of links in `folder` if the stub lies apart from it.

    The server wants the stub inside `backends/python`, where the wheel, which carries one for each Python version,
    cannot put it. Nothing is written into the installed package.
    """
    if installation.stub is None or installation.backends is None:
        return installation.backends
    python_backend = folder / "python"
    python_backend.mkdir(parents=True)
    for entry in (*(installation.backends / "python").iterdir(), installation.stub):
        if entry.is_file():
            (python_backend / entry.name).symlink_to(entry)
    return folder


def find_libpython() -> Path:
    """The shared library of this interpreter, which the Python backend's stub is linked against.

    Raises:
        InstallationError: this Python was built without it.
    """
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    name = f"libpython{PYTHON_VERSION}.so.1.0"
    for folder in (sysconfig.get_config_var("LIBDIR"), f"{sys.base_prefix}/lib"):
        for candidate in (Path(folder) / name, Path(folder) / multiarch / name) if folder else ():
            if candidate.is_file():
                return candidate
    raise InstallationError(
        f"this Python ({sys.executable}) has no shared library {name}, which Triton's Python backend needs; "
        f"install it (Debian, Ubuntu: apt-get install libpython{PYTHON_VERSION}; "
        "pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install) and make the environment again"
    )


def server_environment(installation: Installation) -> dict[str, str]:
    """The environment in which this server finds its libraries, and its Python stub finds this interpreter.

    The stub takes the first `python3` on $PATH for its own environment; PYTHONPATH does not reach it.
    """
    environment = dict(os.environ)
    interpreter = Path(sys.executable).parent
    if not (interpreter / "python3").exists():
        raise InstallationError(f"no python3 beside {sys.executable}: Triton's Python backend would take another one")
    environment["PATH"] = os.pathsep.join(filter(None, [str(interpreter), os.environ.get("PATH")]))
    libraries = [str(folder) for folder in installation.libraries]
    if libraries:
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [*libraries, os.environ.get("LD_LIBRARY_PATH")]))
    return environment


def _installed(binary: Path, source: str) -> Installation:
    home = binary.parent.parent
    backends = home / "backends"
    version_file = home / "TRITON_VERSION"
    return Installation(
        binary=binary,
        source=source,
        version=version_file.read_text().strip() if version_file.is_file() else None,
        backends=backends if backends.is_dir() else None,
    )


def _embedded(package: Path) -> Installation:
    server = package / "tritonserver"
    stub = server / "python_backend_stubs" / PYTHON_VERSION / "triton_python_backend_stub"
    if not stub.is_file():
        available = ", ".join(sorted(entry.name for entry in (server / "python_backend_stubs").iterdir()))
        raise InstallationError(f"{EMBEDDED_PACKAGE} has no stub for Python {PYTHON_VERSION}, only for {available}")
    release = importlib.metadata.version(EMBEDDED_PACKAGE)
    return Installation(
        binary=server / "bin" / "tritonserver",
        source=EMBEDDED_PACKAGE,
        version=_EMBEDDED_RELEASES.get(release),
        backends=server / "backends",
        libraries=(package.parent / "nvidia_pytriton.libs", find_libpython().parent),
        stub=stub,
    )
