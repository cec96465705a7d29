"""How late the generator itself was: a point whose latencies are partly the client's own is no measurement."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

BEAT_S = 0.01
# A loop that shares its processor wakes some milliseconds late by the scheduler's time slices alone.
TOLERATED_MS = 10.0
# About what two runs of the same server differ by; of the median latency, which the client's lag may add to.
TOLERATED_SHARE = 0.05


@dataclass(frozen=True)
class Spread:
    """Of some delays, in milliseconds."""

    p50: float
    p99: float
    max: float

    @classmethod
    def of_seconds(cls, delays: Sequence[float]) -> Spread | None:
        """None where there are none."""
        if not delays:
            return None
        p50, p99 = np.percentile(delays, [50, 99]) * 1000
        return cls(float(p50), float(p99), max(delays) * 1000)


@dataclass(frozen=True)
class ClientLag:
    """Of one run."""

    # From when a request could have been sent (its time had come, and a place was free) to its sending. None in a
    # closed loop, whose turns come when the generator says so.
    sending: Spread | None
    # From when the event loop should have woken to when it did, at a beat of 10 ms: every chunk waits for the loop.
    loop: Spread | None

    def worst(self) -> dict[str, float] | None:
        """What results.json says of a run: the larger of both, figure by figure; None where nothing was measured."""
        spreads = [asdict(spread) for spread in (self.sending, self.loop) if spread]
        return {key: max(spread[key] for spread in spreads) for key in spreads[0]} if spreads else None


def too_late(lag: ClientLag, median_ms: float | None) -> str | None:
    """Why a run is invalid, or None: one of the delays has a P99 above both tolerances.

    `median_ms` is the run's smallest median latency: TTFT, or E2E where nothing streams. Below 10 ms a delay cannot be
    told from the machine's own; above 5 % of the median it shows in every figure that is read from the run. Without a
    median the first tolerance stands alone.
    """
    tolerated_ms = max(TOLERATED_MS, TOLERATED_SHARE * (median_ms or 0.0))
    for spread, what in ((lag.sending, "requests were sent"), (lag.loop, "the client's event loop woke")):
        if spread and spread.p99 > tolerated_ms:
            return f"{what} {spread.p99:.0f} ms late (P99), where {tolerated_ms:.0f} ms are tolerated"
    return None


class LagMeter:
    """Collects the delays of one run."""

    def __init__(self) -> None:
        self._sending: list[float] = []
        self._loop: list[float] = []

    def note_sending(self, delay_s: float) -> None:
        """From when a request could have been sent to its sending."""
        self._sending.append(delay_s)

    async def beat(self) -> None:
        """Wake again and again until cancelled, and note how late."""
        while True:
            due = time.perf_counter() + BEAT_S
            await asyncio.sleep(BEAT_S)
            self.note_beat(time.perf_counter() - due)

    def note_beat(self, delay_s: float) -> None:
        """A wake that comes late stands for those that it kept from coming, each later by one beat less."""
        self._loop += [delay_s, *np.arange(delay_s - BEAT_S, 0.0, -BEAT_S).tolist()]

    def lag(self) -> ClientLag:
        return ClientLag(Spread.of_seconds(self._sending), Spread.of_seconds(self._loop))
