"""When requests are sent: by clients that wait for their answers, at a rate, or as a trace recorded it.

Only the closed loop depends on how fast the server answers. The other two fix every time in advance, so that a request
that had to wait for its turn is seen to have waited (Tene's coordinated omission).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from slipstream_client.errors import SlipstreamError
from slipstream_client.load.source import refused, whole_number
from slipstream_client.load.streams import Stream, generator

_MOST_IN_FLIGHT = 65_536
_LONGEST_RAMP_S = 86_400.0
_LEAST_BURSTINESS = 0.001  # a coefficient of variation of 32
_LEAST_RATE = 1e-6


@dataclass(frozen=True)
class ClosedLoop:
    """So many clients, each sending its next request when its last one has ended."""

    concurrency: int
    ramp_up_s: float = 0.0  # over which the clients begin, evenly

    def __post_init__(self) -> None:
        whole_number("closed loop", "concurrency", self.concurrency, high=_MOST_IN_FLIGHT)
        _check("closed loop", "ramp_up_s", self.ramp_up_s, 0, _LONGEST_RAMP_S)

    @property
    def label(self) -> str:
        """Its name among the points of a comparison."""
        return f"c{self.concurrency}"

    def intended_times(self, count: int, seed: int) -> None:
        """None: the times follow from the answers."""

    def describe(self) -> dict[str, Any]:
        """What results.json says about it."""
        return {"kind": "closed", "concurrency": self.concurrency, "ramp_up_s": self.ramp_up_s}


@dataclass(frozen=True)
class OpenLoop:
    """Requests at a rate, whatever became of those before.

    The gaps are gamma distributed with shape `burstiness` = 1 / CV^2: 1 is a Poisson process, less comes in bursts,
    inf is a metronome. They are rescaled so that the last of n requests arrives after exactly n / rate seconds (as
    vLLM's benchmark does), which takes the seed's share out of the rate. An infinite rate sends all at once.

    During `ramp_up_s` the rate grows linearly from 0; the time is then that at which the integral of the rate reaches
    what it would be without a ramp, so that everything after the ramp comes ramp_up_s / 2 later.
    """

    rate: float  # requests/s
    burstiness: float = 1.0
    ramp_up_s: float = 0.0
    max_concurrency: int | None = None  # in flight; what is due beyond it waits at the client

    def __post_init__(self) -> None:
        _check("open loop", "rate", self.rate, _LEAST_RATE, math.inf)
        _check("open loop", "burstiness", self.burstiness, _LEAST_BURSTINESS, math.inf)
        _check("open loop", "ramp_up_s", self.ramp_up_s, 0, _LONGEST_RAMP_S)
        if self.rate == math.inf and self.ramp_up_s:
            raise refused("open loop", "ramp_up_s", self.ramp_up_s, "0, as the rate is infinite")
        _check_in_flight("open loop", self.max_concurrency)

    @property
    def label(self) -> str:
        """Its name among the points of a comparison."""
        return f"r{self.rate:g}" + ("" if self.burstiness == 1 else f"b{self.burstiness:g}")

    def intended_times(self, count: int, seed: int) -> list[float]:
        """Seconds from the start, ascending, to the microsecond."""  # [count]
        if self.rate == math.inf:
            return [0.0] * count
        return [round(float(time), 6) for time in self._ramped(self._expected_arrivals(count, seed) / self.rate)]

    def _expected_arrivals(self, count: int, seed: int) -> np.ndarray:
        """Arrival times of a process with rate 1, of which the last is `count`."""  # [count]
        if self.burstiness == math.inf:
            return np.arange(1, count + 1, dtype=np.float64)
        gaps = generator(seed, Stream.ARRIVALS).gamma(self.burstiness, size=count)
        # The gaps of a small shape can all be too small for a float.
        gaps[-1:] = np.maximum(gaps[-1:], np.finfo(float).tiny)
        arrivals = np.cumsum(gaps)
        return arrivals * (count / arrivals[-1]) if count else arrivals

    def _ramped(self, times: np.ndarray) -> np.ndarray:
        """Times without a ramp to times with it: the inverse of t^2 / (2 ramp) during it and t - ramp / 2 after."""
        ramp = self.ramp_up_s
        return np.where(times < ramp / 2, np.sqrt(2 * ramp * times), times + ramp / 2)

    def describe(self) -> dict[str, Any]:
        """What results.json says about it; infinite numbers as "inf", which JSON has none of."""
        return {
            "kind": "open",
            "rate": _finite(self.rate),
            "burstiness": _finite(self.burstiness),
            "ramp_up_s": self.ramp_up_s,
            "max_concurrency": self.max_concurrency,
        }


@dataclass(frozen=True)
class Replay:
    """Requests at the times of a trace, `speed` times as fast."""

    times: tuple[float, ...]  # seconds, ascending from 0
    speed: float = 1.0
    max_concurrency: int | None = None
    file: str = ""  # that the times are from

    def __post_init__(self) -> None:
        if not self.times or self.times[0] != 0 or any(not early <= late for early, late in pairwise(self.times)):
            raise SlipstreamError("replay: times must ascend from 0")
        _check("replay", "speed", self.speed, 1e-6, 1e6)
        _check_in_flight("replay", self.max_concurrency)

    @property
    def label(self) -> str:
        """Its name among the points of a comparison."""
        return "trace" if self.speed == 1 else f"trace-x{self.speed:g}"

    def intended_times(self, count: int, seed: int) -> list[float]:
        """The first `count` arrivals in seconds from the start; a trace needs no seed."""  # [count]
        if count > len(self.times):
            raise SlipstreamError(f"the trace has {len(self.times)} arrivals where {count} are asked for")
        return [round(time / self.speed, 6) for time in self.times[:count]]

    def describe(self) -> dict[str, Any]:
        """What results.json says about it."""
        return {
            "kind": "trace",
            "file": self.file,
            "arrivals": len(self.times),
            "duration_s": self.times[-1] / self.speed,
            "speed": self.speed,
            "max_concurrency": self.max_concurrency,
        }


Load = ClosedLoop | OpenLoop | Replay


def offered_sha256(requests: Iterable[Any], times: Sequence[float] | None = None) -> str:
    """Hash of everything that is offered, in order: texts, lengths, limits and, where they are fixed, the times.

    `requests` are dataclasses (WorkloadRequest), as many as there are `times`.
    """
    digest = hashlib.sha256()
    lines = (asdict(request) for request in requests)
    if times is not None:
        lines = (line | {"intended": time} for line, time in zip(lines, times, strict=True))
    for line in lines:
        digest.update(json.dumps(line, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _check(place: str, field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise refused(place, field, value, f"numbers from {low:g} to {high:g}")


def _check_in_flight(place: str, limit: int | None) -> None:
    if limit is not None:
        whole_number(place, "max_concurrency", limit, high=_MOST_IN_FLIGHT)


def _finite(value: float) -> float | str:
    return "inf" if value == math.inf else value
