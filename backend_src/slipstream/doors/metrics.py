"""An engine's gauges and counters on Triton's metrics endpoint, set by the door that leads, at a low rate."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from itertools import accumulate
from typing import Literal

import triton_python_backend_utils as pb_utils

from slipstream.engine.latencies import END_TO_END_EDGES, FIRST_TOKEN_EDGES, INTER_TOKEN_EDGES, LatencyCounts
from slipstream.engine.messages import EngineStats

_GAUGES = {
    "slipstream_requests_running": "Sequences that the engine computes",
    "slipstream_requests_waiting": "Sequences that wait: requests in the engine's queue, each of their choices",
    "slipstream_kv_cache_usage": "Share of KV blocks in use, 0 to 1",
    "slipstream_kv_blocks_used": "KV blocks in use",
    "slipstream_kv_blocks_peak": "Most KV blocks in use since the previous publication",
    "slipstream_kv_blocks_cached": "Free KV blocks that the prefix cache could still hand out",
    "slipstream_kv_blocks_total": "KV blocks of the pool",
    "slipstream_engine_up": "1 while the engine process answers, else 0",
}
# metric -> field of EngineStats
_COUNTERS = {
    "slipstream_prompt_tokens_total": ("prompt_tokens", "Prompt tokens of accepted requests"),
    "slipstream_generation_tokens_total": ("generation_tokens", "Tokens generated"),
    "slipstream_preemptions_total": ("preemptions", "Preemptions by recomputation"),
    "slipstream_prefix_cache_queries_total": (
        "prefix_queried_tokens",
        "Prompt tokens looked up in the prefix cache when their request was first admitted",
    ),
    "slipstream_prefix_cache_hits_total": ("prefix_hit_tokens", "Those of them that were found"),
    "slipstream_prefix_cache_readmission_queries_total": (
        "readmission_queried_tokens",
        "Tokens looked up in the prefix cache when a preempted request came back",
    ),
    "slipstream_prefix_cache_readmission_hits_total": ("readmission_hit_tokens", "Those of them that were found"),
    "slipstream_steps_total": ("steps", "Steps computed"),
    "slipstream_useful_tokens_total": (
        "useful_tokens",
        "Rows put through the model for a request, once each",
    ),
    "slipstream_computed_tokens_total": (
        "computed_tokens",
        "All rows put through the model, with padding and what was computed again",
    ),
    "slipstream_kv_waste_steps_total": (
        "kv_waste_steps",
        "Sum over steps of 1 - tokens held / (KV blocks held x block size)",
    ),
}
# metric -> field of EngineStats with a count for each reason
_COUNTERS_BY_REASON = {
    "slipstream_requests_finished_total": (
        "finished",
        "Sequences ended (one for each choice of a request), by reason",
    ),
    "slipstream_requests_refused_total": (
        "refused",
        "Requests that the engine did not take in, by reason: unavailable (its queue is full, it ends) or invalid",
    ),
}
# Each is published as the counters that a histogram of Prometheus consists of: with a histogram of Triton's own every
# token would be a round trip. metric -> field of EngineStats, edges of the buckets in seconds
_HISTOGRAMS = {
    "slipstream_time_to_first_token_seconds": (
        "first_token",
        FIRST_TOKEN_EDGES,
        "From a sequence's arrival at the door to its first token, also where nothing is streamed",
    ),
    "slipstream_inter_token_latency_seconds": (
        "inter_token",
        INTER_TOKEN_EDGES,
        "Between two tokens of a sequence",
    ),
    "slipstream_e2e_request_latency_seconds": (
        "end_to_end",
        END_TO_END_EDGES,
        "From a sequence's arrival at the door to its end, of those not cancelled or failed",
    ),
}


class MetricsPublisher:
    """Publishes what the engine reports to this door; a door that does not lead publishes nothing.

    Every change is a round trip to the server, so a thread of its own makes them, at most once for each report, and
    none where nothing has changed.
    """

    def __init__(self, labels: dict[str, str]) -> None:
        kind = pb_utils.MetricFamily
        self._labels = labels
        self._families = {name: kind(name=name, description=text, kind=kind.GAUGE) for name, text in _GAUGES.items()}
        self._families |= {
            name: kind(name=name, description=text, kind=kind.COUNTER) for name, (_, text) in _COUNTERS.items()
        }
        self._families |= {
            name: kind(name=name, description=text, kind=kind.COUNTER)
            for name, (_, text) in _COUNTERS_BY_REASON.items()
        }
        self._families |= {
            f"{name}_{part}": kind(name=f"{name}_{part}", description=text, kind=kind.COUNTER)
            for name, (_, _, text) in _HISTOGRAMS.items()
            for part in ("bucket", "sum", "count")
        }
        self._metrics: dict[tuple[str, ...], pb_utils.Metric] = {}
        self._gauges: dict[str, float] = {}  # as they were set last
        self._published = EngineStats()
        self._pending: EngineStats | None = None
        self._down = False
        self._changed = threading.Condition()
        self._closing = self._closed = False
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def publish(self, stats: EngineStats, published: EngineStats | None = None) -> None:
        """Publish a report of the living engine; `published` is what another door has counted of it already."""
        with self._changed:
            if published is not None:
                self._published = published
            if self._closed:
                self._add_counters(stats)
                return
            peak = self._pending.kv_blocks_peak if self._pending else 0
            self._pending = stats
            stats.kv_blocks_peak = max(stats.kv_blocks_peak, peak)
            self._changed.notify()

    def engine_down(self) -> None:
        """The engine is gone: its gauges fall to zero, and the counters of the next one are added to its own."""
        with self._changed:
            self._pending = None
            self._down = True
            self._changed.notify()

    def close(self) -> None:
        """Leave the gauges at zero, since Triton keeps them; a door that leads next publishes them anew.

        What is reported from now on is still counted.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout=5)
        with self._changed:
            self._closed = True
            if self._pending is not None:
                self._add_counters(self._pending)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending is not None or self._down or self._closing)
                if self._closing and self._pending is None:
                    break
                stats, self._pending = self._pending, None
                down, self._down = self._down, False
            if down:
                self._gauges.clear()  # the next engine may have another door as its leader
            if down and self._metrics:
                self._set_gauges(EngineStats(kv_blocks_total=self._published.kv_blocks_total), up=0)
                self._published = EngineStats()
            if stats is not None:
                # What ended is counted before the gauges say that nothing runs.
                self._add_counters(stats)
                self._set_gauges(stats, up=1)
        if self._metrics:
            self._set_gauges(EngineStats(), up=0)

    def _set_gauges(self, stats: EngineStats, up: int) -> None:
        total = stats.kv_blocks_total
        values = {
            "slipstream_requests_running": stats.running,
            "slipstream_requests_waiting": stats.waiting,
            "slipstream_kv_cache_usage": stats.kv_blocks_used / total if total else 0.0,
            "slipstream_kv_blocks_used": stats.kv_blocks_used,
            "slipstream_kv_blocks_peak": stats.kv_blocks_peak,
            "slipstream_kv_blocks_cached": stats.kv_blocks_cached,
            "slipstream_kv_blocks_total": total,
            "slipstream_engine_up": up,
        }
        for name, value in values.items():
            if self._gauges.get(name) != value:
                self._gauges[name] = value
                self._change("set", value, name)

    def _add_counters(self, stats: EngineStats) -> None:
        for name, (field, _) in _COUNTERS.items():
            self._count(name, getattr(stats, field) - getattr(self._published, field))
        for name, (field, _) in _COUNTERS_BY_REASON.items():
            before: Mapping[str, int] = getattr(self._published, field)
            for reason, count in getattr(stats, field).items():
                self._count(name, count - before.get(reason, 0), reason=reason)
        for name, (field, edges, _) in _HISTOGRAMS.items():
            self._add_histogram(name, edges, getattr(stats, field), getattr(self._published, field))
        self._published = stats

    def _add_histogram(
        self, name: str, edges: tuple[float, ...], counts: LatencyCounts, published: LatencyCounts
    ) -> None:
        """Every bucket holds all that is no longer than its edge, which is its label."""
        added = list(accumulate(now - before for now, before in zip(counts.counts, published.counts, strict=True)))
        for edge, count in zip((*map(str, edges), "+Inf"), added, strict=True):
            self._count(f"{name}_bucket", count, le=edge)
        self._count(f"{name}_count", added[-1])
        self._count(f"{name}_sum", counts.sum_s - published.sum_s)

    def _count(self, name: str, added: float, **label: str) -> None:
        if added or (name, *label.values()) not in self._metrics:
            self._change("increment", added, name, **label)

    def _change(self, how: Literal["set", "increment"], value: float, name: str, **label: str) -> None:
        """Change one metric. What Triton refuses, as a counter that would fall, costs that change and nothing else."""
        try:
            getattr(self._metric(name, **label), how)(value)
        except Exception as error:
            pb_utils.Logger.log_error(f"metric {name} was not changed: {error}")

    def _metric(self, name: str, **label: str) -> pb_utils.Metric:
        key = (name, *label.values())
        if key not in self._metrics:
            self._metrics[key] = self._families[name].Metric(labels=self._labels | label)
        return self._metrics[key]
