"""What a soak run has seen of one server, what was wrong with it, and both as a plain table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from soak_requests import REFUSED, SoakRequest

# Most growth of a process's resident memory for each request of the second half.
BYTES_PER_REQUEST = 1e6 / 100


@dataclass(frozen=True)
class Ended:
    """A request and how it ended; `wrong` is what was not as it should be."""

    request: SoakRequest
    outcome: str
    wrong: str | None = None


@dataclass(frozen=True)
class Idle:
    """A server with nothing to do. Resident bytes are by process: its role and its id."""

    resident: Mapping[tuple[str, int], int]
    finished: Mapping[str, int]  # requests that the engine has ended since its start, by reason
    preemptions: int
    blocks_used: int
    blocks_cached: int
    blocks_total: int
    gauges: Mapping[str, float]
    tracebacks: int  # in the server's log


@dataclass(frozen=True)
class Report:
    """One server's part of a soak run."""

    queue_order: str
    num_requests: int
    seconds: float
    ended: list[Ended]
    start: Idle
    half: Idle
    end: Idle

    @property
    def failures(self) -> list[str]:
        """Everything that is not as it must be, in words."""
        return list(self._failures())

    def table(self) -> str:
        """All of it for a terminal."""
        return "\n".join([*self._requests(), "", *self._memory(), "", *self._state(), "", *self._verdict()])

    def _failures(self) -> Iterator[str]:
        wrong = [ended for ended in self.ended if ended.wrong is not None]
        for ended in wrong:
            yield f"{ended.request}: {ended.wrong}"
        numbers = Counter(ended.request.number for ended in self.ended)
        if set(numbers.values()) != {1} or len(numbers) != self.num_requests:
            yield f"{len(numbers)} requests of {self.num_requests} have ended, {len(self.ended)} times in all"
        seen: Counter[str] = Counter()
        for ended in self.ended:
            if ended.outcome != REFUSED:
                seen[ended.outcome] += ended.request.num_choices
        counted = Counter(self.end.finished) - Counter(self.start.finished)
        if counted != seen and not wrong:
            yield f"the engine counted {dict(counted)}, the clients saw {dict(seen)}"
        if self.end.preemptions == self.start.preemptions:
            yield "nothing was preempted, so the pool was not short"
        if self.end.blocks_used or self.end.blocks_cached > self.end.blocks_total:
            yield f"at rest {self.end.blocks_used} blocks are used and {self.end.blocks_cached} cached"
        if set(self.end.gauges.values()) != {0.0}:
            yield f"at rest gauges are not 0: {dict(self.end.gauges)}"
        if self.end.tracebacks > self.start.tracebacks:
            yield f"{self.end.tracebacks - self.start.tracebacks} tracebacks in the server's log"
        if not self.start.resident.keys() == self.half.resident.keys() == self.end.resident.keys():
            yield f"other processes at the end: {sorted(self.end.resident)} instead of {sorted(self.start.resident)}"
        for process, grown in self._growth().items():
            if grown >= BYTES_PER_REQUEST * self._second_half:
                yield f"{process[0]} grew by {grown / 1e6:.2f} MB in the second half of the run"

    @property
    def _second_half(self) -> int:
        return self.num_requests - self.num_requests // 2

    def _growth(self) -> dict[tuple[str, int], int]:
        """Bytes over the second half, of the processes that lived through it."""
        return {
            process: end - self.half.resident[process]
            for process, end in self.end.resident.items()
            if process in self.half.resident
        }

    def _requests(self) -> Iterator[str]:
        yield f"queue_order {self.queue_order}: {self.num_requests} requests in {self.seconds:.0f} s"
        yield f"{'kind':<16} {'requests':>8}  outcomes"
        for kind in dict.fromkeys(sorted(ended.request.kind for ended in self.ended)):
            outcomes = Counter(ended.outcome for ended in self.ended if ended.request.kind == kind)
            listed = ", ".join(f"{outcome} {count}" for outcome, count in sorted(outcomes.items()))
            yield f"{kind:<16} {outcomes.total():8d}  {listed}"

    def _memory(self) -> Iterator[str]:
        allowed = BYTES_PER_REQUEST * self._second_half / 1e6
        yield f"{'resident MB':<24} {'start':>8} {'half':>8} {'end':>8} {'second half':>12} (less than {allowed:.2f})"
        growth = self._growth()
        for process in sorted(growth):
            start, half, end = (idle.resident.get(process, 0) / 1e6 for idle in (self.start, self.half, self.end))
            yield f"{process[0]:<24} {start:8.1f} {half:8.1f} {end:8.1f} {growth[process] / 1e6:+12.2f}"

    def _state(self) -> Iterator[str]:
        end = self.end
        yield f"preemptions {end.preemptions - self.start.preemptions}"
        yield f"blocks at rest: {end.blocks_used} used, {end.blocks_cached} cached, {end.blocks_total} in all"
        yield "gauges at rest: " + ", ".join(f"{name} {value:g}" for name, value in end.gauges.items())

    def _verdict(self) -> Iterator[str]:
        failures = self.failures
        yield f"FAILED: {len(failures)}" if failures else "passed"
        yield from (f"  {failure}" for failure in failures[:20])
