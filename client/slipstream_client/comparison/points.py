"""The points of a comparison as the command line asks for them: workloads, loads, and how many requests of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream_client.comparison.plan import Point
from slipstream_client.errors import SlipstreamError
from slipstream_client.load.arrivals import ClosedLoop, Load, OpenLoop
from slipstream_client.load.sweep import rates, whole_numbers
from slipstream_client.load.traces import read_replay
from slipstream_client.load.workload import make_workload

# What `variance` stands for: from equal lengths to a heavy tail, about what chat has (sharegpt-like: 0.9).
VARIANCE_SWEEP = tuple(f"variance:{sigma:g}" for sigma in (0, 0.25, 0.5, 1.0, 1.5))
_OPEN_SECONDS = 30
_LEAST_OPEN = 24


@dataclass(frozen=True)
class LoadFlags:
    """How requests arrive, as given: at most one of the first three."""

    concurrency: str | None = None
    request_rate: str | None = None
    trace: str | None = None
    trace_speed: float = 1.0
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ramp_up_s: float = 0.0

    def loads(self, default_concurrency: str) -> tuple[Load, ...]:
        """One load for each number that was given.

        Raises:
            SlipstreamError: flags that exclude each other, or a value that is not allowed.
        """
        given = [flag for flag in ("concurrency", "request_rate", "trace") if getattr(self, flag) is not None]
        if len(given) > 1:
            names = " and ".join(f"--{flag.replace('_', '-')}" for flag in given)
            raise SlipstreamError(f"{names} exclude each other: clients that wait, a rate, or a trace")
        if self.trace is not None:
            return (read_replay(self.trace, self.trace_speed, self.max_concurrency),)
        if self.request_rate is not None:
            return tuple(
                OpenLoop(rate, self.burstiness, self.ramp_up_s, self.max_concurrency)
                for rate in rates("--request-rate", self.request_rate)
            )
        if self.burstiness != 1:
            raise SlipstreamError("--burstiness is of --request-rate: clients that wait leave gaps as they come")
        if self.max_concurrency is not None:
            raise SlipstreamError("--max-concurrency bounds --request-rate or --trace; alone it is --concurrency")
        levels = whole_numbers("--concurrency", default_concurrency if self.concurrency is None else self.concurrency)
        return tuple(ClosedLoop(level, self.ramp_up_s) for level in levels)


@dataclass(frozen=True)
class WorkloadFlags:
    """Which requests are offered, as given."""

    names: Sequence[str]
    scale: float = 1.0
    max_input: int | None = None
    max_output: int | None = None
    seed: int = 0


def make_points(workloads: WorkloadFlags, loads: Sequence[Load], requests: str | None, extra: int) -> tuple[Point, ...]:
    """Every workload under every load; `extra` requests beyond those asked for are warm-up and cool-down.

    Raises:
        SlipstreamError: no such workload, or as many counts as there are loads were not given.
    """
    counts = [count + extra for count in _counts(loads, requests)]
    expanded = [each for name in workloads.names for each in (VARIANCE_SWEEP if name == "variance" else (name,))]
    points = []
    for name in dict.fromkeys(expanded):
        made = make_workload(
            name,
            max(counts),
            workloads.seed,
            scale=workloads.scale,
            max_input=workloads.max_input,
            max_output=workloads.max_output,
        )
        points += [Point(made, load, min(count, len(made.requests))) for load, count in zip(loads, counts, strict=True)]
    return tuple(points)


def _counts(loads: Sequence[Load], requests: str | None) -> list[int]:
    """Requests of each load; where none are given, enough for the tail to mean something, growing slowly."""
    if requests is None:
        return [_default_count(load) for load in loads]
    counts = list(_numbers("--requests", requests))
    if len(counts) == 1:
        counts *= len(loads)
    if len(counts) != len(loads):
        raise SlipstreamError(f"--requests has {len(counts)} numbers for {len(loads)} loads")
    return counts


def _default_count(load: Load) -> int:
    if isinstance(load, ClosedLoop):
        return load.concurrency * math.ceil(12 / math.sqrt(load.concurrency))
    if isinstance(load, OpenLoop):
        expected = _OPEN_SECONDS * load.rate
        return max(math.ceil(expected), _LEAST_OPEN) if math.isfinite(expected) else _LEAST_OPEN
    return len(load.times)


def _numbers(option: str, text: str) -> list[int]:
    """Whole numbers, which may be the same for several loads."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise SlipstreamError(f"{option} {text!r} is no list of whole numbers") from None
    if min(numbers) < 1:
        raise SlipstreamError(f"{option} {text!r}: every number must be at least 1")
    return numbers
