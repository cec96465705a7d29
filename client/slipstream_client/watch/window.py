"""The last readings of a metrics endpoint, and what can be said of each engine over them: rates and percentiles.

Increases are taken as Prometheus takes them: between two readings, and a counter that has fallen began anew at 0.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from slipstream_client.metrics_text import parse_samples

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_HISTOGRAMS = {
    "ttft": "slipstream_time_to_first_token_seconds",
    "itl": "slipstream_inter_token_latency_seconds",
    "e2e": "slipstream_e2e_request_latency_seconds",
}
# Their clients get the whole answer at once, and Triton has a queue in front of them.
_LOCK_STEP = ("static", "dynamic")

Key = tuple[str, str]  # name of a metric, and the upper edge of its bucket or ""


@dataclass(frozen=True)
class EngineReading:
    """One engine's metrics in one reading, with Triton's of the model that has the engine's name."""

    batcher: str
    values: Mapping[Key, float]  # summed over further labels

    def get(self, name: str) -> float:
        return self.values.get((name, ""), 0.0)


@dataclass(frozen=True)
class EngineView:
    """What is known of one engine now and over the window; seconds, and None where nothing came."""

    engine: str
    batcher: str
    up: bool
    running: int
    waiting: int  # in the engine's queue and in Triton's own
    kv_blocks_used: int
    kv_blocks_total: int
    window_s: float  # what rates, increases and percentiles are over
    generated_tokens_per_s: float | None
    prompt_tokens_per_s: float | None
    streams: bool
    ttft_s: Mapping[str, float] | None  # by the names in QUANTILES
    itl_s: Mapping[str, float] | None
    e2e_s: Mapping[str, float] | None
    triton_queue_mean_s: float | None  # comes on top of `e2e_s`; lock-step models alone have that queue
    preemptions: int  # since the server's start, as are the refusals
    new_preemptions: int
    refusals: int
    new_refusals: int


def read_engines(text: str) -> dict[str, EngineReading]:
    """Every engine that a page of metrics tells of, by name, in the order of the names."""
    values: dict[str, dict[Key, float]] = defaultdict(lambda: defaultdict(float))
    batchers: dict[str, str] = {}
    for sample in parse_samples(text, "slipstream_", "nv_inference_"):
        model = sample.labels.get("model", "")
        values[model][sample.name, sample.labels.get("le", "")] += sample.value
        if sample.name == "slipstream_engine_up":
            batchers[model] = sample.labels.get("batcher", model)
    return {name: EngineReading(batchers[name], dict(values[name])) for name in sorted(batchers)}


class Window:
    """The readings of the last `seconds`, and never fewer than two where there are two."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._readings: deque[tuple[float, Mapping[str, EngineReading]]] = deque()

    def add(self, now: float, engines: Mapping[str, EngineReading]) -> None:
        self._readings.append((now, engines))
        while len(self._readings) > 2 and self._readings[1][0] <= now - self._seconds:
            self._readings.popleft()

    def clear(self) -> None:
        """Forget all readings: what happened since the last one is not known."""
        self._readings.clear()

    def views(self) -> list[EngineView]:
        """The engines of the newest reading."""
        if not self._readings:
            return []
        return [self._view(engine, reading) for engine, reading in self._readings[-1][1].items()]

    def _view(self, engine: str, now: EngineReading) -> EngineView:
        readings = [(time, engines[engine]) for time, engines in self._readings if engine in engines]
        seconds = readings[-1][0] - readings[0][0]
        added = _increases([reading.values for _, reading in readings])

        def rate(name: str) -> float | None:
            return added[name, ""] / seconds if seconds else None

        streams = now.batcher not in _LOCK_STEP
        latencies = {name: _quantiles(added, metric) for name, metric in _HISTOGRAMS.items()}
        answered = added["nv_inference_request_success", ""]
        queue_us = added["nv_inference_queue_duration_us", ""]
        return EngineView(
            engine=engine,
            batcher=now.batcher,
            up=now.get("slipstream_engine_up") == 1,
            running=round(now.get("slipstream_requests_running")),
            waiting=round(now.get("slipstream_requests_waiting") + now.get("nv_inference_pending_request_count")),
            kv_blocks_used=round(now.get("slipstream_kv_blocks_used")),
            kv_blocks_total=round(now.get("slipstream_kv_blocks_total")),
            window_s=seconds,
            generated_tokens_per_s=rate("slipstream_generation_tokens_total"),
            prompt_tokens_per_s=rate("slipstream_prompt_tokens_total"),
            streams=streams,
            ttft_s=latencies["ttft"] if streams else None,
            itl_s=latencies["itl"] if streams else None,
            e2e_s=latencies["e2e"],
            triton_queue_mean_s=queue_us / answered / 1e6 if answered and not streams else None,
            preemptions=round(now.get("slipstream_preemptions_total")),
            new_preemptions=round(added["slipstream_preemptions_total", ""]),
            refusals=round(now.get("slipstream_requests_refused_total")),
            new_refusals=round(added["slipstream_requests_refused_total", ""]),
        )


def quantile(share: float, buckets: Iterable[tuple[float, float]]) -> float | None:
    """Estimate a quantile from how many values were at most each edge, as Prometheus's `histogram_quantile` does.

    Inside a bucket the values are taken as evenly spread; one beyond the last finite edge is given as that edge.
    None where there are no values.
    """
    ordered = sorted(buckets)
    if not ordered or ordered[-1][1] <= 0:
        return None
    rank = share * ordered[-1][1]
    lower_edge, lower_count = 0.0, 0.0
    for edge, count in ordered:
        if count >= rank and count > lower_count:
            if math.isinf(edge):
                return lower_edge
            return lower_edge + (edge - lower_edge) * (rank - lower_count) / (count - lower_count)
        lower_edge, lower_count = edge, max(count, lower_count)
    return lower_edge


def _increases(readings: Sequence[Mapping[Key, float]]) -> defaultdict[Key, float]:
    added: defaultdict[Key, float] = defaultdict(float)
    for before, after in pairwise(readings):
        for key, value in after.items():
            # One that was not there before has counted since then.
            previous = before.get(key, 0.0)
            added[key] += value - previous if value >= previous else value
    return added


def _quantiles(added: Mapping[Key, float], metric: str) -> dict[str, float] | None:
    buckets = [(float(edge), count) for (name, edge), count in added.items() if name == f"{metric}_bucket"]
    found = {name: quantile(share, buckets) for name, share in QUANTILES.items()}
    return {name: value for name, value in found.items() if value is not None} or None
