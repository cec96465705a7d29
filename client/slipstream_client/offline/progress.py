"""What a batch says while it runs: a live bar on a terminal, now and then a line elsewhere; all on standard error."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from slipstream_client.offline.runner import Attempt, Outcome
from slipstream_client.tensors import Generation

_LINE_EVERY_S = 10.0
_WIDE = 76  # cells, for the times to stand beside the counts


class BatchProgress:
    """A context manager; its methods follow the course of a batch."""

    def __init__(self, console: Console, total: int, answered_before: int) -> None:
        self._console = console
        self._total = total
        self.ended = answered_before
        self.answered = self.failed = self.retried = self.tokens = 0  # of this run
        self._start = self._last_line = time.monotonic()
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self._bar = Progress(
            BarColumn(bar_width=max(4, min(30, console.width - _WIDE + 12))),
            MofNCompleteColumn(),
            TextColumn("requests, {task.fields[note]}"),
            *(times if console.width >= _WIDE else ()),
            console=console,
            refresh_per_second=2,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, completed=answered_before, note=self._note())

    def __enter__(self) -> BatchProgress:
        self._start = self._last_line = time.monotonic()  # a server may have been started meanwhile
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def say(self, text: str) -> None:
        """One line that stays."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def attempt_ended(self, attempt: Attempt) -> None:
        self.retried += attempt.number > 1

    def request_ended(self, outcome: Outcome) -> None:
        self.ended += 1
        if isinstance(outcome, Generation):
            self.answered += 1
            self.tokens += sum(choice.num_output_tokens for choice in (outcome, *outcome.others))
        else:
            self.failed += 1
        self._bar.update(self._task, completed=self.ended, note=self._note())
        if not self._console.is_terminal and time.monotonic() - self._last_line >= _LINE_EVERY_S:
            self._last_line = time.monotonic()
            self.say(f"{self.ended} of {self._total} requests, {self._note()}")

    def _note(self) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        retried = f", {self.retried} retries" if self.retried else ""
        return f"{self.tokens / max(self.seconds, 1e-9):.1f} tokens/s{failed}{retried}"
