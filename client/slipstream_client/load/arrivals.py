"""When the requests of a run are to be sent: fixed in advance, whatever the server does; or by who is free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class ClosedLoop:
    """`concurrency` clients, each of which sends its next request when its last has ended."""

    concurrency: int
    ramp_up_s: float = 0.0  # in which the clients join, evenly

    @property
    def label(self) -> str:
        return f"c{self.concurrency}"

    def describe(self) -> dict[str, Any]:
        return {"kind": "closed"} | asdict(self)

    def intended_times(self, count: int, seed: int) -> list[float] | None:
        return None


@dataclass(frozen=True)
class OpenLoop:
    """Arrivals at `rate` requests a second with gamma gaps of shape `burstiness`: 1 is Poisson, inf is even."""

    rate: float
    burstiness: float = 1.0
    ramp_up_s: float = 0.0
    max_concurrency: int | None = None

    @property
    def label(self) -> str:
        return f"r{self.rate:g}"

    def describe(self) -> dict[str, Any]:
        return {"kind": "open"} | asdict(self)

    def intended_times(self, count: int, seed: int) -> list[float] | None:
        if math.isinf(self.burstiness):
            return [index / self.rate for index in range(count)]
        gaps = np.random.default_rng(seed).gamma(self.burstiness, 1 / (self.rate * self.burstiness), count)
        return [float(at) for at in np.cumsum(gaps) - gaps[0]]


@dataclass(frozen=True)
class Replay:
    """The arrivals of a trace, `speed` times as fast."""

    times: Sequence[float]
    speed: float = 1.0
    max_concurrency: int | None = None

    @property
    def label(self) -> str:
        return "trace"

    def describe(self) -> dict[str, Any]:
        return {"kind": "trace", "speed": self.speed, "max_concurrency": self.max_concurrency}

    def intended_times(self, count: int, seed: int) -> list[float] | None:
        return [at / self.speed for at in self.times[:count]]


Load = ClosedLoop | OpenLoop | Replay
