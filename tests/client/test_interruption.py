"""Signals that end a command in order, also in a job that a shell has put into the background."""

from __future__ import annotations

import os
import signal

import pytest

from slipstream_client.interruption import ended_as_by_ctrl_c


def kill_oneself(number: signal.Signals) -> None:
    with ended_as_by_ctrl_c():
        os.kill(os.getpid(), number)
        signal.pause()


@pytest.mark.parametrize("ctrl_c", [signal.default_int_handler, signal.SIG_IGN])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_as_ctrl_c_does(ctrl_c: object, number: signal.Signals) -> None:
    before = signal.signal(signal.SIGINT, ctrl_c)  # type: ignore[arg-type]
    handler = signal.getsignal(number)
    try:
        with pytest.raises(KeyboardInterrupt):
            kill_oneself(number)
        assert signal.getsignal(number) == handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_as_by_ctrl_c():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
