"""Signals that end a command in order."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def ended_as_by_ctrl_c() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a command as Ctrl-C does, with all that it has started."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        # By way of whoever handles Ctrl-C now: an exception raised here could be lost in a callback of gRPC's. A shell
        # lets its background jobs ignore Ctrl-C; then nobody does.
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    previous = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
