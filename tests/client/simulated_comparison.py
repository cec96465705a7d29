"""A comparison that never ran: closed-loop clients against simple models of the batchers, on step times of a small CPU.

The numbers are made up by rule, but they hang together as measured ones do: rows add up, latencies follow from steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from random import Random
from typing import Any

SEATS = 16
BLOCK = 16
STEP_MS = ((1, 21), (2, 22), (4, 24), (8, 30), (16, 45), (32, 78), (64, 148), (128, 270), (256, 520), (8192, 16600))
BATCHERS = ("static", "dynamic", "iterative", "continuous")
LOCK_STEP = ("static", "dynamic")
MODEL_NOTE = "The weights are de-quantised from Q4_1: answers are not those of the original model."


def comparison(
    batchers: Sequence[str] = BATCHERS, concurrencies: Sequence[int] = (1, 4, 16), count: int = 24
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What results.json and requests.jsonl would hold."""
    runs, requests = [], []
    for concurrency, batcher in itertools.product(concurrencies, batchers):
        run, records = simulate(batcher, concurrency, count)
        runs.append(run)
        requests += records
    lengths = _lengths(count)
    spread = {"mean": 61.3, "min": 8, "max": 512, "total": sum(prompt for prompt, _ in lengths)}
    results = {
        "version": 1,
        "interrupted": False,
        "environment": {"cpu": "Some CPU", "memory_bytes": 24 * 2**30, "packages": {}, "model_note": MODEL_NOTE},
        "workload": {"name": "mixed", "seed": 0, "sha256": "9f2c" * 16, "input_tokens": spread, "max_tokens": 384},
        "runs": runs,
        "quality": {"equal": True, "compared": count * (len(runs) - 1), "different": []},
    }
    return results, requests


def simulate(batcher: str, concurrency: int, count: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One run: its summary and its records."""
    lock_step = batcher in LOCK_STEP
    waiting = [_request(index, *lengths) for index, lengths in enumerate(_lengths(count))]
    in_flight: list[dict[str, Any]] = []
    running: list[dict[str, Any]] = []
    records = []
    now, useful, computed, held, reserved = 0.0, 0, 0, 0, 0
    while waiting or in_flight:
        while waiting and len(in_flight) < concurrency:
            in_flight.append(waiting.pop(0) | {"sent": now})
        fresh = []
        if not (lock_step and running):
            fresh = [request for request in in_flight if request["start"] is None][: SEATS - len(running)]
        prompts = [request["prompt"] for request in fresh]
        padded = sum(prompts) if batcher == "continuous" else max(prompts, default=0) * len(fresh)
        live = [request for request in running if request["end"] is None]
        useful += sum(prompts) + len(live)
        computed += padded + len(running)
        before, now = now, now + step_seconds(padded + len(running))
        for request in fresh:
            request["start"] = before
        running += fresh
        for request in live + fresh:
            request["times"].append(now)
            if len(request["times"]) == request["answer"]:
                request["end"] = now
        sizes = [request["prompt"] + len(request["times"]) for request in live + fresh]
        held += sum(sizes)
        rooms = [max(prompts + [r["prompt"] for r in running]) + 384] * len(running) if lock_step else sizes
        reserved += sum(-(-size // BLOCK) * BLOCK for size in rooms)
        done = [request for request in running if request["end"] is not None]
        if not lock_step or len(done) == len(running):
            for request in done:
                running.remove(request)
                in_flight.remove(request)
                records.append(_record(request, batcher, concurrency, now, lock_step))
    records.sort(key=lambda record: record["index"])
    return _summary(records, useful, computed, 1 - held / reserved), records


def step_seconds(rows: int) -> float:
    """What one step of `rows` rows takes, interpolated."""
    (low, low_ms), (high, high_ms) = next(pair for pair in itertools.pairwise(STEP_MS) if rows <= pair[1][0])
    return (low_ms + (high_ms - low_ms) * max(rows - low, 0) / (high - low)) / 1000


def _lengths(count: int) -> list[tuple[int, int]]:
    random = Random(0)

    def draw(mu: float, sigma: float, low: int, high: int) -> int:
        return min(max(round(random.lognormvariate(mu, sigma)), low), high)

    return [(draw(3.84, 0.8, 8, 512), draw(3.37, 1.0, 4, 384)) for _ in range(count)]


def _request(index: int, prompt: int, answer: int) -> dict[str, Any]:
    return {"index": index, "prompt": prompt, "answer": answer, "start": None, "end": None, "times": []}


def _record(request: dict[str, Any], batcher: str, concurrency: int, now: float, lock_step: bool) -> dict[str, Any]:
    tokens = len(request["times"])
    return {
        "id": f"{batcher}-c{concurrency}-{request['index']:05d}",
        "batcher": batcher,
        "executor": "native",
        "concurrency": concurrency,
        "index": request["index"],
        "intended": request["sent"],
        "sent": request["sent"],
        "first": None if lock_step else request["times"][0],
        "last": now,
        "chunks": [(now, tokens)] if lock_step else [(time, 1) for time in request["times"]],
        "input_tokens": request["prompt"],
        "output_tokens": tokens,
        "finish_reason": "stop",
        "error": None,
        "retries": 0,
        "queue_ms": (now - request["sent"] - (request["end"] - request["start"])) * 1000,
        "stats": {"queue_ms": 0.0},
    }


def _statistics(values: list[float]) -> dict[str, float] | None:
    ordered = sorted(values)
    if not ordered:
        return None
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    at = {name: ordered[round(share * (len(ordered) - 1))] for name, share in shares.items()}
    return {"mean": sum(ordered) / len(ordered)} | at


def _summary(records: list[dict[str, Any]], useful: int, computed: int, kv_waste: float) -> dict[str, Any]:
    batcher, concurrency = records[0]["batcher"], records[0]["concurrency"]
    streamed = [record for record in records if record["first"] is not None]
    gaps = [after[0] - before[0] for record in streamed for before, after in itertools.pairwise(record["chunks"])]
    decode = [(r["last"] - r["first"]) / (r["output_tokens"] - 1) for r in streamed if r["output_tokens"] > 1]
    duration = max(record["last"] for record in records)
    return {
        "batcher": batcher,
        "executor": "native",
        "concurrency": concurrency,
        "requests": len(records),
        "failures": 0,
        "duration_s": duration,
        "output_tokens_per_s": sum(record["output_tokens"] for record in records) / duration,
        "requests_per_s": len(records) / duration,
        "ttft_ms": _statistics([(record["first"] - record["sent"]) * 1000 for record in streamed]),
        "itl_ms": _statistics([gap * 1000 for gap in gaps]),
        "tpot_ms": _statistics([time * 1000 for time in decode]),
        "e2e_ms": _statistics([(record["last"] - record["sent"]) * 1000 for record in records]),
        "queue_ms": _statistics([record["queue_ms"] for record in records]),
        "useful_tokens": useful,
        "computed_tokens": computed,
        "padding_fraction": 1 - useful / computed,
        "kv_waste_fraction": kv_waste,
        "kv_peak_blocks": 20 * concurrency + 7,
        "preemptions": 0,
        "triton_inferences": len(records),
        # Batches as full as the clients allow where Triton, or the client, forms them.
        "triton_executions": -(-len(records) // concurrency) if batcher in LOCK_STEP else len(records),
        "gpu_utilization": None,
        "gpu_memory_bytes": None,
        "cpu_percent": 187.4,
        "rss_bytes": 1_530_000_000,
    }


def run_of(results: dict[str, Any], batcher: str, concurrency: int = 16) -> dict[str, Any]:
    """One of the runs."""
    return next(r for r in results["runs"] if (r["batcher"], r["concurrency"]) == (batcher, concurrency))


def fail(run: dict[str, Any], requests: list[dict[str, Any]], count: int, error: str) -> None:
    """Let the first `count` requests of a run fail; where none is left, every statistic is gone."""
    mine = [r for r in requests if (r["batcher"], r["concurrency"]) == (run["batcher"], run["concurrency"])]
    for record in mine[:count]:
        record |= {"error": error, "first": None, "chunks": [], "queue_ms": None, "output_tokens": 0}
    run["failures"] = count
    if count == run["requests"]:
        run |= dict.fromkeys(("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "queue_ms", "padding_fraction"))
        run |= {"output_tokens_per_s": 0.0, "requests_per_s": 0.0, "kv_waste_fraction": None}
