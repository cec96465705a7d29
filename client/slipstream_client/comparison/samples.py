"""What the statistics of a comparison need of each run: arrays over its measured requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream_client.comparison.request_figures import e2e_intended_ms, succeeded, ttft_intended_ms
from slipstream_client.comparison.run_figures import measured, window_s
from slipstream_client.load.records import RequestRecord


@dataclass(frozen=True)
class RunSamples:
    """One run; arrays are in the order of the workload, so that one place of them is one request in every run.

    Latencies are in ms from the intended time, which is what the users waited; NaN where there is none.
    """

    variant: str
    workload: str
    point: str
    repeat: int
    closed: bool  # a closed loop: what is sent next waits for an answer
    window_s: float
    tokens: np.ndarray  # [requests] of output; 0 for a failed one
    flight_s: np.ndarray  # [requests] from sending to the end, failed or not
    e2e_ms: np.ndarray  # [requests]
    ttft_ms: np.ndarray  # [requests]

    @property
    def failures(self) -> int:
        """Requests without a full answer."""
        return int(np.isnan(self.e2e_ms).sum())


def run_samples(run: Mapping[str, Any], records: Sequence[RequestRecord]) -> RunSamples:
    """Take the samples of one entry of "runs" in results.json from all of its records."""
    counted = sorted(measured(records), key=lambda record: record.index)

    def each(value: Callable[[RequestRecord], float | None], otherwise: float) -> np.ndarray:
        values = (value(record) if succeeded(record) else None for record in counted)
        return np.array([otherwise if value is None else value for value in values], dtype=float)

    ends = [(record.sent, record.last) for record in counted]
    return RunSamples(
        variant=run["variant"],
        workload=run["workload"],
        point=run["point"],
        repeat=run["repeat"],
        closed=run["load"]["kind"] == "closed",
        window_s=window_s(counted),
        tokens=each(lambda record: record.output_tokens, 0.0),
        flight_s=np.array([0.0 if sent is None or last is None else last - sent for sent, last in ends]),
        e2e_ms=each(e2e_intended_ms, np.nan),
        ttft_ms=each(ttft_intended_ms, np.nan),
    )


def figures_of_requests(run: RunSamples, chosen: np.ndarray) -> dict[str, np.ndarray]:
    """The compared figures [rows], had the run consisted of the `chosen` requests [rows, requests]; NaN for none.

    Throughput is tokens by window. In a closed loop requests bring their own time with them: the window is their time
    in flight by the mean number in flight, which holds exactly (Little 1961) and is kept. Where the arrivals are fixed
    in advance, so is the window.
    """
    flight_s = run.flight_s.sum()
    share = run.flight_s[chosen].sum(axis=1) / flight_s if run.closed and flight_s else np.ones(len(chosen))
    with np.errstate(divide="ignore", invalid="ignore"):
        tokens_per_s = run.tokens[chosen].sum(axis=1) / (share * run.window_s)
    e2e_mean, e2e_p99 = _mean_and_p99(run.e2e_ms[chosen])
    ttft_mean, ttft_p99 = _mean_and_p99(run.ttft_ms[chosen])
    return {
        "output_tokens_per_s": tokens_per_s,
        "e2e_mean_ms": e2e_mean,
        "e2e_p99_ms": e2e_p99,
        "ttft_mean_ms": ttft_mean,
        "ttft_p99_ms": ttft_p99,
    }


def _mean_and_p99(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of every row of [rows, n], NaN left out: [rows] each."""
    rows, n = values.shape
    counts = n - np.isnan(values).sum(axis=1)
    if n == 0 or not counts.any():
        return np.full(rows, np.nan), np.full(rows, np.nan)
    if counts.min() == n:
        return values.mean(axis=1), np.percentile(values, 99, axis=1)
    with np.errstate(invalid="ignore"):
        means = np.nansum(values, axis=1) / counts
    place = 0.99 * np.maximum(counts - 1, 0)  # linear interpolation, as np.percentile's
    below = place.astype(int)[:, None]
    in_order = np.sort(values, axis=1)  # NaN last
    low, high = (np.take_along_axis(in_order, at, axis=1)[:, 0] for at in (below, np.minimum(below + 1, n - 1)))
    return means, np.where(place == below[:, 0], low, low + (high - low) * (place - below[:, 0]))
