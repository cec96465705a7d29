"""Noticing that tritonserver is gone, and ending the doors that it leaves behind.

A Python stub ends by itself when its server does, unless a call into the dead server holds its interpreter: setting a
gauge waits for the server's answer with the interpreter locked. Such a stub would live for ever, its engine with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable


class ServerWatch:
    """Watches one server process; `descriptor` becomes readable when it ends."""

    def __init__(self) -> None:
        self.descriptor: int | None = None
        self._gone_since: float | None = None

    def watch(self, pid: int) -> None:
        """Start to watch; a server that is gone already counts as gone from now on."""
        if self.descriptor is None and self._gone_since is None:
            try:
                self.descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self.note_gone()

    def note_gone(self) -> None:
        """The descriptor has become readable."""
        self._gone_since = time.monotonic()
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def gone_for(self, seconds: float) -> bool:
        """Whether the server has been gone for that long."""
        return self._gone_since is not None and time.monotonic() - self._gone_since > seconds

    @property
    def gone(self) -> bool:
        return self._gone_since is not None


def kill_doors(pids: Iterable[int]) -> None:
    """End doors that still hold their connection, so their ids are theirs, although their server is gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
