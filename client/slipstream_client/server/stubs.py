"""The processes in which tritonserver's Python backend runs the models, one a model instance."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import psutil

from slipstream_client.server.paths import SHARED_MEMORY


@dataclass(frozen=True)
class Stub:
    pid: int
    model: str
    region: str  # name of its shared memory region

    def remove_region(self) -> None:
        """Remove its shared memory, which a stub that was killed leaves behind: 1 MiB and more each."""
        with contextlib.suppress(OSError):
            (SHARED_MEMORY / self.region).unlink()


def living_stubs(server_pid: int) -> list[Stub]:
    """Stubs of a running tritonserver. One that was killed, and that the server never reaps, is not among them.

    A stub's command line is: stub, REPOSITORY/MODEL/VERSION/model.py, shared memory region, sizes, server's pid, …
    """
    found = []
    try:
        children = psutil.Process(server_pid).children()
    except psutil.NoSuchProcess:
        return []
    for child in children:
        try:
            arguments = child.cmdline()
        except psutil.Error:
            continue
        if len(arguments) > 2 and Path(arguments[0]).name == "triton_python_backend_stub":
            found.append(Stub(child.pid, Path(arguments[1]).parent.parent.name, arguments[2]))
    return found
