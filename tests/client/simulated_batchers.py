"""Simple models of the batchers, on step times of a small CPU: what one run would leave in its records and steps.

The numbers are made up by rule, but they hang together as measured ones do: rows add up, latencies follow from steps.
"""

from __future__ import annotations

import itertools
import math
from random import Random
from typing import Any

SEATS = 16
BLOCK = 16
MAX_TOKENS = 384
STEP_MS = ((1, 21), (2, 22), (4, 24), (8, 30), (16, 45), (32, 78), (64, 148), (128, 270), (256, 520), (8192, 16600))
LOCK_STEP = ("static", "dynamic")
CLIENT_S = 0.0003  # from a request's turn to its sending
NETWORK_S = 0.0005
DELIVERY_S = 0.0008
SCHEDULE_S = 0.0004
UPDATE_S = 0.0002
QUEUE_DELAY_S = 0.005
CLOCK_OFFSET_S = 1000.0


def batcher_of(variant: str) -> str:
    """ "dynamic" of "dynamic (transformers)" or "dynamic,max_batch_size=8"."""
    return variant.replace(",", " ").split()[0]


def step_seconds(rows: int) -> float:
    """What one step of `rows` rows takes, interpolated."""
    (low, low_ms), (high, high_ms) = next(pair for pair in itertools.pairwise(STEP_MS) if rows <= pair[1][0])
    return (low_ms + (high_ms - low_ms) * max(rows - low, 0) / (high - low)) / 1000


def lengths(workload: str, count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Input and output tokens of each request; of `variance:X` the output lengths vary by about X of their mean."""
    random = Random(seed)

    def draw(mu: float, sigma: float, low: int, high: int) -> int:
        return min(max(round(random.lognormvariate(mu, sigma)), low), high)

    if workload.startswith("variance:"):
        variation = float(workload.partition(":")[2])
        sigma = math.sqrt(math.log(1 + variation**2))
        return [(64, draw(math.log(48) - sigma**2 / 2, sigma, 2, MAX_TOKENS)) for _ in range(count)]
    longer = 0.7 if workload == "short-long" else 0.0
    return [(draw(3.84, 0.8, 8, 512), draw(3.37 + longer, 1.0, 4, MAX_TOKENS)) for _ in range(count)]


def arrivals(load: dict[str, Any], count: int, seed: int = 0) -> list[float]:
    """Poisson arrivals at the rate of an open loop."""
    random = Random(seed + 77)
    return list(itertools.accumulate(random.expovariate(load["rate"]) for _ in range(count)))


class Simulation:
    """One run of one variant; `records` and `steps` are as in the files, but for the run's id."""

    def __init__(
        self, variant: str, sizes: list[tuple[int, int]], load: dict[str, Any], seed: int, repeat: int
    ) -> None:
        self.batcher = batcher_of(variant)
        self.lock_step = self.batcher in LOCK_STEP
        self.speed = math.exp(Random(f"{variant}{load}{seed}{repeat}").gauss(0, 0.012))
        self.speed *= 2.2 if "transformers" in variant else 1.0
        self.load = load
        self.records: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self._coming = [{"index": i, "prompt": p, "answer": a, "times": []} for i, (p, a) in enumerate(sizes)]
        self._due: list[dict[str, Any]] = []  # sent, and on their way to the server
        self._waiting: list[dict[str, Any]] = []
        self._running: list[dict[str, Any]] = []
        self._now = 0.0
        if load["kind"] == "open":
            for request, intended in zip(self._coming, arrivals(load, len(sizes), seed), strict=True):
                self._send(request, intended)
            self._coming = []
        else:
            clients = min(load["concurrency"], SEATS) if self.batcher == "static" else load["concurrency"]
            for _ in range(min(clients, len(sizes))):
                self._send(self._coming.pop(0), 0.0)
        while self._due or self._waiting or self._running:
            self._step()
        self.records.sort(key=lambda record: record["index"])

    def _send(self, request: dict[str, Any], intended: float) -> None:
        arrival = intended + CLIENT_S + NETWORK_S
        request |= {"intended": intended, "sent": intended + CLIENT_S, "arrival": arrival, "waited": 0, "end": None}
        self._due.append(request)

    def _step(self) -> None:
        if not self._running and not self._waiting:
            delay = QUEUE_DELAY_S if self.batcher == "dynamic" else 0.0
            self._now = max(self._now, min(request["arrival"] for request in self._due) + delay)
        arrived = [request for request in self._due if request["arrival"] <= self._now]
        self._due = [request for request in self._due if request["arrival"] > self._now]
        self._waiting += arrived
        fresh: list[dict[str, Any]] = []
        if not (self.lock_step and self._running):
            fresh = self._waiting[: SEATS - len(self._running)]
            self._waiting = self._waiting[len(fresh) :]
        for request in self._waiting:
            request["waited"] += 1
        prompts = [request["prompt"] for request in fresh]
        padded = sum(prompts) if self.batcher == "continuous" else max(prompts, default=0) * len(fresh)
        live = [request for request in self._running if request["end"] is None]
        finished = len(self._running) - len(live)
        start, run_s = self._now, step_seconds(padded + len(self._running)) * self.speed
        for request in fresh:
            request["start"] = start
        self._running += fresh
        self._now += SCHEDULE_S + run_s + UPDATE_S
        for request in live + fresh:
            request["times"].append(self._now)
            if len(request["times"]) == request["answer"]:
                request["end"] = self._now
        sizes = [request["prompt"] + len(request["times"]) for request in live + fresh]
        longest = max((request["prompt"] for request in self._running), default=0) + MAX_TOKENS
        rooms = [longest] * len(self._running) if self.lock_step else sizes
        waiting = 0 if self.batcher == "dynamic" else len(self._waiting)  # Triton's own queue is not the engine's
        row = {
            "index": len(self.steps),
            "start_s": start,
            "schedule_s": SCHEDULE_S,
            "run_s": run_s,
            "update_s": UPDATE_S,
            "prefill_rows": sum(prompts),
            "decode_rows": len(live),
            "recomputed_rows": 0,
            "prompt_padding_rows": padded - sum(prompts),
            "finished_rows": finished,
            "sampled_rows": len(live) + len(fresh),
            "running": len(live) + len(fresh),
            "waiting": waiting,
            "left": sum(request["end"] is None for request in self._running) + waiting,
            "preemptions": 0,
            "kv_blocks_used": sum(-(-room // BLOCK) for room in rooms),
            "kv_tokens_held": sum(sizes),
        }
        self.steps.append(row)
        done = [request for request in self._running if request["end"] is not None]
        if not self.lock_step or len(done) == len(self._running):
            self._answer(done)

    def _answer(self, done: list[dict[str, Any]]) -> None:
        for request in done:
            self._running.remove(request)
            self.records.append(self._record(request))
        free = len(done)
        if self.batcher == "static" and self._due:
            free = 0
        for _ in range(min(free, len(self._coming))):
            self._send(self._coming.pop(0), self._now + DELIVERY_S)

    def _record(self, request: dict[str, Any]) -> dict[str, Any]:
        tokens, last = len(request["times"]), self._now + DELIVERY_S
        first = None if self.lock_step else request["times"][0] + DELIVERY_S
        at_door = request["start"] if self.batcher == "dynamic" else request["arrival"]
        return {
            "id": f"{request['index']:05d}",
            "run": "",
            "index": request["index"],
            "phase": "measured",
            "intended": request["intended"],
            "sent": request["sent"],
            "first": first,
            "last": last,
            "chunks": [(last, tokens)] if first is None else [(time + DELIVERY_S, 1) for time in request["times"]],
            "input_tokens": request["prompt"],
            "output_tokens": tokens,
            "finish_reason": "stop",
            "error": None,
            "error_code": None,
            "retries": 0,
            "output_ids": None,
            "stats": {
                "queue_ms": (request["start"] - at_door) * 1000,
                "first_token_ms": (request["times"][0] - at_door) * 1000,
                "inference_ms": (request["end"] - request["start"]) * 1000,
                "num_input_tokens": request["prompt"],
                "num_output_tokens": tokens,
                "cached_tokens": 0,
                "preemptions": 0,
                "waited_for": {"seats": request["waited"], "blocks": 0, "budget": 0, "priority": 0},
                "arrival_s": at_door + CLOCK_OFFSET_S,
                "held_ms": (self._now - request["end"]) * 1000 if self.lock_step else 0.0,
            },
        }
