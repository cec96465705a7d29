"""Waiting for a state of another process: looked at often, given up on late, never slept for."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 60.0


def wait_until(condition: Callable[[], object], what: str, seconds: float = PATIENCE_S) -> None:
    """Return as soon as the condition holds.

    Raises:
        AssertionError: it does not after that many seconds.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)
