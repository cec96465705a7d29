"""A program in a session of its own that never outlives its owner, and that can be ended with all it started."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from slipstream_client.errors import SlipstreamError
from slipstream_client.server import tether

_MARK = "SLIPSTREAM_SERVER_ID"


class TetheredProcess:
    """A running program.

    The session of its own keeps Ctrl-C in a terminal from it; the owner decides what that means. The kernel kills it
    when the owner dies, however that happens. A mark in the environment, which all its descendants inherit, tells them
    from other processes, whatever sessions they make for themselves.

    Args:
        command: the program's path and arguments.
        environment: all of its environment.
        folder: its working directory.
        output: the file to which its standard output and error are appended.

    Raises:
        SlipstreamError: it cannot be run.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path, output: Path) -> None:
        self.exited = threading.Event()
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        self._seen: dict[int, psutil.Process] = {}
        self._looking = threading.Lock()
        launched: queue.SimpleQueue[subprocess.Popen[bytes] | OSError] = queue.SimpleQueue()
        # The tether holds to the thread that starts the process, so this one stays for as long as the process.
        threading.Thread(
            target=self._run,
            args=(command, environment, folder, output, launched),
            name=Path(command[0]).name,
            daemon=True,
        ).start()
        process = launched.get()
        if isinstance(process, OSError):
            raise SlipstreamError(f"{command[0]} cannot be run: {process}")
        self._process = process
        self.pid: int = process.pid

    @property
    def running(self) -> bool:
        return not self.exited.is_set()

    @property
    def ending(self) -> str:
        """How it ended, once it has: "exit code 1", "killed by SIGKILL"."""
        code = self._process.returncode
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def process_ids(self) -> list[int]:
        """Every living process of it: the program itself and all its descendants; any thread may ask."""
        mark = self._mark.encode()
        with self._looking:
            for environment in Path("/proc").glob("[0-9]*/environ"):
                pid = int(environment.parent.name)
                # Ended meanwhile, or another user's.
                with contextlib.suppress(OSError, psutil.NoSuchProcess):
                    if pid not in self._seen and mark in environment.read_bytes().split(b"\0"):
                        self._seen[pid] = psutil.Process(pid)
            # One that was killed loses its environment at once, and lives on until all its memory is given back.
            self._seen = {pid: process for pid, process in self._seen.items() if _is_alive(process)}
            return sorted(self._seen)

    def terminate(self) -> None:
        """Ask the program itself to end."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def end_all(self, grace_s: float) -> None:
        """End the program and its descendants: by SIGTERM within `grace_s` seconds, else by SIGKILL."""
        for end, timeout_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
            for pid in self.process_ids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, end)
            deadline = time.monotonic() + timeout_s
            while self.process_ids() and time.monotonic() < deadline:
                time.sleep(0.05)

    def _run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        output: Path,
        launched: queue.SimpleQueue[subprocess.Popen[bytes] | OSError],
    ) -> None:
        name, _, value = self._mark.partition("=")
        try:
            with output.open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-I", tether.__file__, str(os.getpid()), *command],
                    env={**environment, name: value},
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            launched.put(error)
            return
        launched.put(process)
        process.wait()
        self.exited.set()


def _is_alive(process: psutil.Process) -> bool:
    """Whether it still runs; one that only waits for its parent to notice does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
