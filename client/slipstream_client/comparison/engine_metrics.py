"""What an engine and Triton counted during a run, read from the server's Prometheus metrics four times a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from slipstream_client.metrics_text import parse_samples
from slipstream_client.server.triton_http import TritonHttp, TritonRefused, TritonUnreachable

PERIOD_S = 0.25
# Engines publish every 0.5 s while busy and once more when going idle: figures that stood still for longer are final.
_SETTLED_S = 0.8
_SETTLE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class EngineFigures:
    """Counted over one run; None where the server does not say."""

    useful_tokens: int | None = None  # rows put through the model that served a token of a request
    computed_tokens: int | None = None  # all rows put through the model
    padding_fraction: float | None = None
    kv_waste_fraction: float | None = None  # of the KV space held, the part without a token, averaged over steps
    kv_peak_blocks: int | None = None
    preemptions: int | None = None
    triton_inferences: int | None = None  # rows that Triton handed to the model; of `iterative` one for each token
    triton_executions: int | None = None  # calls of the model that these took: fewer where there were batches
    gpu_utilization: float | None = None  # mean, 0..1
    gpu_memory_bytes: int | None = None  # peak

    def as_results(self) -> dict[str, Any]:
        """Keys as in results.json."""
        return asdict(self)


@dataclass(frozen=True)
class Scrape:
    """One reading: an engine's and its model's metrics by name (summed over further labels), and the GPUs'."""

    values: Mapping[str, float]

    def get(self, name: str) -> float | None:
        return self.values.get(name)

    @property
    def busy(self) -> bool:
        running, waiting = self.get("slipstream_requests_running"), self.get("slipstream_requests_waiting")
        return bool(running or waiting)


def parse_scrape(text: str, engine: str, model: str) -> Scrape:
    """Pick one engine's metrics, Triton's of one model and the GPUs' from Prometheus text."""
    values: dict[str, float] = {}
    for sample in parse_samples(text, "slipstream_", "nv_inference_", "nv_gpu_"):
        name = sample.name
        owner = model if name.startswith("nv_inference_") else engine
        if name.startswith("nv_gpu_") or sample.labels.get("model") == owner:
            values[name] = values.get(name, 0.0) + sample.value
    return Scrape(values)


class EngineWatch:
    """Watches one engine, and what Triton does with one of its models, from `start` to `stop`; a thread of its own."""

    def __init__(self, url: str, engine: str, model: str) -> None:
        self._engine = engine
        self._model = model
        self._server = TritonHttp(url)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="slipstream-metrics", daemon=True)
        self._peak_blocks: float | None = None
        self._gpu_utilization: list[float] = []
        self._gpu_memory: float | None = None
        self._before = Scrape({})

    def start(self) -> None:
        """Read the counters before the run; an unreachable endpoint leaves every figure None."""
        self._before = self._read() or Scrape({})
        self._peak_blocks = self._gpu_memory = None
        self._thread.start()

    def stop(self) -> EngineFigures:
        """Wait until the engine is idle and its counters stand still, and return what this run added."""
        self._stop.set()
        self._thread.join()
        after = self._settle()
        return self._figures(after)

    def _watch(self) -> None:
        while not self._stop.wait(PERIOD_S):
            scrape = self._read()
            if scrape and scrape.busy and (utilization := scrape.get("nv_gpu_utilization")) is not None:
                self._gpu_utilization.append(utilization)

    def _read(self) -> Scrape | None:
        try:
            scrape = parse_scrape(self._server.metrics(), self._engine, self._model)
        except (TritonUnreachable, TritonRefused):
            return None
        # Until the engine publishes its first step of this run, the high-water mark is still that of the run before.
        if scrape.get("slipstream_steps_total") != self._before.get("slipstream_steps_total"):
            self._peak_blocks = _larger(self._peak_blocks, scrape.get("slipstream_kv_blocks_peak"))
        self._gpu_memory = _larger(self._gpu_memory, scrape.get("nv_gpu_memory_used_bytes"))
        return scrape

    def _settle(self) -> Scrape:
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        last, since = self._read() or Scrape({}), time.monotonic()
        while time.monotonic() < deadline:
            if not last.busy and time.monotonic() - since >= _SETTLED_S:
                break
            time.sleep(PERIOD_S)
            scrape = self._read() or Scrape({})
            if _counters(scrape) != _counters(last):
                since = time.monotonic()
            last = scrape
        return last

    def _figures(self, after: Scrape) -> EngineFigures:
        def added(name: str) -> float | None:
            value = after.get(name)
            return None if value is None else value - (self._before.get(name) or 0.0)

        useful, computed = added("slipstream_useful_tokens_total"), added("slipstream_computed_tokens_total")
        wasted, steps = added("slipstream_kv_waste_steps_total"), added("slipstream_steps_total")
        utilization = self._gpu_utilization
        return EngineFigures(
            useful_tokens=_whole(useful),
            computed_tokens=_whole(computed),
            padding_fraction=1 - useful / computed if useful is not None and computed else None,
            kv_waste_fraction=wasted / steps if wasted is not None and steps else None,
            kv_peak_blocks=_whole(self._peak_blocks),
            preemptions=_whole(added("slipstream_preemptions_total")),
            triton_inferences=_whole(added("nv_inference_count")),
            triton_executions=_whole(added("nv_inference_exec_count")),
            gpu_utilization=sum(utilization) / len(utilization) if utilization else None,
            gpu_memory_bytes=_whole(self._gpu_memory),
        )


def _counters(scrape: Scrape) -> dict[str, float]:
    return {name: value for name, value in scrape.values.items() if name.endswith("_total")}


def _larger(one: float | None, other: float | None) -> float | None:
    return max((value for value in (one, other) if value is not None), default=None)


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
