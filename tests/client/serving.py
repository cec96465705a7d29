"""`slipstream serve` as a process that gets signals, and what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

SLIPSTREAM = [str(Path(sys.executable).parent / "slipstream")]
FREE_PORTS = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]


class Serving:
    """A running `slipstream serve --json`, which has said that it is ready; `environment` is added to this one's."""

    def __init__(self, log: Path, *options: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [*SLIPSTREAM, "serve", "--json", "--log", str(log), *FREE_PORTS, *options],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.event()["event"] == "starting"
        self.ready = self.event()
        assert self.ready["event"] == "ready"
        self.server = psutil.Process(self.ready["pid"])
        self._processes: set[psutil.Process] = set()
        self.processes()

    def processes(self) -> set[psutil.Process]:
        """The server and all that runs below it now or did when this was last asked."""
        self._processes |= {self.server, *self.server.children(recursive=True)}
        return self._processes

    def event(self) -> dict[str, Any]:
        """The next event."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        line = self.process.stdout.readline()
        assert line, f"it said nothing more, and to standard error: {self.process.stderr.read()}"
        return dict(json.loads(line))

    def ended(self) -> tuple[int, str]:
        """Exit code and what stands on standard error, once it has ended; nothing of the server may be left then."""
        _, errors = self.process.communicate(timeout=60)
        left = [each for each in self._processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
        assert left == []
        return self.process.returncode, errors

    def kill(self) -> None:
        """End it however it fares; the kernel ends the server with it."""
        self.process.kill()
        self.process.communicate()
