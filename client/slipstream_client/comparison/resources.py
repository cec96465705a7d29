"""Memory and CPU time of the server's processes during a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

PERIOD_S = 0.5


@dataclass(frozen=True)
class ProcessFigures:
    """Of one run; None where the server's processes are not ours to see."""

    cpu_percent: float | None = None  # 100 is one core
    rss_bytes: int | None = None  # peak

    def as_results(self) -> dict[str, Any]:
        """Keys as in results.json."""
        return asdict(self)


class ProcessWatch:
    """Watches the processes that `process_ids` names, in a thread of its own.

    `others` are names of models and engines that are loaded but idle: a stub or an engine whose command line holds a
    file or folder of such a name does not belong to the run and is left out.
    """

    def __init__(self, process_ids: Callable[[], list[int]], others: Iterable[str] = ()) -> None:
        self._process_ids = process_ids
        self._others = frozenset(others)
        self._processes: list[psutil.Process] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="slipstream-resources", daemon=True)
        self._cpu_s = 0.0
        self._rss = 0

    def start(self) -> None:
        self._processes = list(self._ours())
        self._cpu_s = _cpu_seconds(self._processes)
        self._thread.start()

    def stop(self, duration_s: float) -> ProcessFigures:
        """Return what was seen in a run of `duration_s` seconds that has just ended."""
        used = _cpu_seconds(self._processes) - self._cpu_s
        self._stop.set()
        self._thread.join()
        self._sample()
        return ProcessFigures(100 * used / duration_s if duration_s else None, self._rss or None)

    def _watch(self) -> None:
        while not self._stop.wait(PERIOD_S):
            self._sample()

    def _sample(self) -> None:
        self._rss = max(self._rss, sum(_of(process, lambda p: p.memory_info().rss) for process in self._processes))

    def _ours(self) -> Iterable[psutil.Process]:
        for pid in self._process_ids():
            try:
                process = psutil.Process(pid)
                command = process.cmdline()
            except psutil.Error:
                continue
            if not command:  # it is about to end
                continue
            names = {Path(name).stem for part in command for name in part.split("/")}
            # The server's own command line names every model that it loads.
            if Path(command[0]).name == "tritonserver" or not names & self._others:
                yield process


def _cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    return sum(_of(process, lambda p: sum(p.cpu_times()[:2])) for process in processes)


def _of(process: psutil.Process, value: Callable[[psutil.Process], float]) -> Any:
    try:
        return value(process)
    except psutil.Error:  # it ended meanwhile
        return 0
