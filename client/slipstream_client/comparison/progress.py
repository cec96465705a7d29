"""What a comparison says while it runs: a live bar on a terminal, plain lines elsewhere; all on standard error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from slipstream_client.comparison.plan import PlannedRun
from slipstream_client.load.records import RequestRecord


class CompareProgress:
    """A context manager; its methods follow the course of a comparison."""

    def __init__(self, console: Console, total_runs: int) -> None:
        self._console = console
        self._total_runs = total_runs
        self._runs = 0
        self._failures = 0
        self._tokens = 0
        self._task: TaskID | None = None
        # The client shares its processors with the server: a slow refresh leaves them to it.
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=2,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> CompareProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """One line that stays."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def run_started(self, planned: PlannedRun) -> None:
        self._runs += 1
        self._failures = self._tokens = 0
        self._task = self._bar.add_task(self._title(planned.id), total=planned.point.num_requests, note="")

    def request_ended(self, record: RequestRecord) -> None:
        self._failures += record.error is not None
        self._tokens += record.output_tokens
        if self._task is not None:
            failed = f", {self._failures} failed" if self._failures else ""
            self._bar.update(self._task, advance=1, note=f"{self._tokens} tokens{failed}")

    def run_ended(self, run: Mapping[str, Any]) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        e2e = f"mean latency {run['e2e_ms']['mean'] / 1000:.2f} s" if run["e2e_ms"] else "no answer"
        failed = f", {run['failures']} failed" if run["failures"] else ""
        doubt = "".join(f"; not valid: {reason}" for reason in run["invalid_because"])
        self.say(
            f"{self._title(run['id'])}: {run['requests']} requests in {run['duration_s']:.1f} s, "
            f"{run['output_tokens_per_s']:.1f} tokens/s, {e2e}{failed}{doubt}"
        )

    def _title(self, run_id: str) -> str:
        return f"[{self._runs}/{self._total_runs}] {run_id}"
