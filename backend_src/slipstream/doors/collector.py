"""Waiting, inside `execute`, for the engine's answers to everything that was just submitted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from slipstream.engine.messages import Output
from slipstream.errors import Unavailable


class Collector:
    """Gathers one output for each awaited id; the link's thread delivers, Triton's thread waits."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._awaited: set[int] = set()
        self._outputs: dict[int, Output] = {}
        self._failure: str | None = None

    def expect(self, ids: Collection[int]) -> None:
        """Say, before submitting, which ids will be answered."""
        with self._news:
            self._awaited, self._outputs, self._failure = set(ids), {}, None

    def deliver(self, output: Output) -> None:
        """Take in one answer; what nobody waits for is dropped."""
        with self._news:
            if output.id in self._awaited:
                self._awaited.discard(output.id)
                self._outputs[output.id] = output
                self._news.notify()

    def fail(self, reason: str) -> None:
        """End the wait: no further answer will come."""
        with self._news:
            self._failure = reason
            self._news.notify()

    def wait(self, while_waiting: Callable[[set[int]], None], interval_s: float) -> dict[int, Output]:
        """All outputs by id, once they are there; meanwhile `while_waiting` is called with the ids still awaited.

        Raises:
            Unavailable: with the reason that `fail` was given.
        """
        while True:
            with self._news:
                if self._news.wait_for(lambda: not self._awaited or self._failure is not None, interval_s):
                    if self._failure is not None:
                        raise Unavailable(self._failure)
                    return self._outputs
                awaited = set(self._awaited)
            while_waiting(awaited)
