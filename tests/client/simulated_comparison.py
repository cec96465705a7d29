"""A comparison that never ran: what results.json, requests.jsonl and steps.jsonl of version 2 would hold.

Every figure of a run follows from its records and steps, and every comparison from the runs.
"""

from __future__ import annotations

import itertools
import math
import pickle
import statistics
from collections.abc import Sequence
from typing import Any

from simulated_batchers import (
    CLOCK_OFFSET_S,
    LOCK_STEP,
    MAX_TOKENS,
    NETWORK_S,
    SEATS,
    Simulation,
    batcher_of,
    lengths,
)
from simulated_statistics import conclude

BATCHERS = ("static", "dynamic", "iterative", "continuous")
MODEL_NOTE = "The weights are de-quantised from Q4_1: answers are not those of the original model."
SLO = {"chat": {"ttft": 2000.0, "tpot": 200.0, "e2e": None}, "whole": {"ttft": None, "tpot": None, "e2e": 8000.0}}
WARM_UP, COOL_DOWN = 2, 1
_made: dict[tuple, bytes] = {}  # a simulation takes a second, and every caller changes its own
Data = tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]


def comparison(
    variants: Sequence[str] = BATCHERS,
    points: Sequence[str] = ("c1", "c4", "c16"),
    workloads: Sequence[str] = ("mixed",),
    *,
    count: int = 24,
    repeats: int = 2,
    seed: int = 0,
) -> Data:
    """results, requests, steps: every variant at every point of every workload; `count` requests count in each run."""
    key = (tuple(variants), tuple(points), tuple(workloads), count, repeats, seed)
    if key not in _made:
        _made[key] = pickle.dumps(_comparison(*key))
    return pickle.loads(_made[key])


def _comparison(
    variants: Sequence[str], points: Sequence[str], workloads: Sequence[str], count: int, repeats: int, seed: int
) -> Data:
    runs, requests, steps = [], [], []
    for workload, point, repeat in itertools.product(workloads, points, range(repeats)):
        for variant in variants if repeat % 2 == 0 else reversed(variants):
            run, records, run_steps = simulate(variant, workload, point, count=count, seed=seed, repeat=repeat)
            runs.append(run)
            requests += records
            steps += run_steps
    results = {
        "version": 2,
        "interrupted": False,
        "command": ["slipstream", "compare", "--batchers", ",".join(variants), "--workload", ",".join(workloads)],
        "started": "2026-03-01T12:00:00+00:00",
        "environment": {
            "cpu": "Some CPU",
            "memory_bytes": 24 * 2**30,
            "packages": {},
            "engine": {"max_num_seqs": str(SEATS), "block_size": "16"},
            "model_note": MODEL_NOTE,
        },
        "plan": {
            "variants": [_planned(variant) for variant in variants],
            "baseline": "dynamic" if "dynamic" in variants else next(iter(variants), ""),
            "repeats": repeats,
            "order": [run["id"] for run in runs],
            "slo": SLO,
            "warm_up": WARM_UP,
            "cool_down": COOL_DOWN,
        },
        "workloads": [_described(workload, points, count, seed) for workload in workloads],
        "tuning": _tuning() if "dynamic" in variants else None,
        "runs": runs,
    }
    conclude(results, requests)
    return results, requests, steps


def simulate(variant: str, workload: str, point: str, *, count: int, seed: int, repeat: int) -> Data:
    """One run: its entry in the results, its records and its steps."""
    closed = point.startswith("c")
    at = float(point[1:])
    load = {"kind": "closed", "concurrency": int(at)} if closed else {"kind": "open", "rate": at, "burstiness": 1.0}
    offered = count + WARM_UP + COOL_DOWN
    simulation = Simulation(variant, lengths(workload, offered, seed), load, seed, repeat)
    run = {
        "id": f"{variant}/{workload}/{point}/{repeat}",
        "variant": variant,
        "model": batcher_of(variant),
        "executor": "transformers" if "transformers" in variant else "native",
        "streams": batcher_of(variant) not in LOCK_STEP,
        "workload": workload,
        "load": load,
        "point": point,
        "repeat": repeat,
        "clock_offset_s": CLOCK_OFFSET_S,
        "valid": True,
        "invalid_because": [],
        "client_lag_ms": {"p50": 0.2, "p99": 1.1, "max": 2.0},
        "client_processes": 1,
        "triton_inferences": offered,
        # Batches as full as the clients allow where Triton, or the client, forms them.
        "triton_executions": sum(step["prefill_rows"] > 0 for step in simulation.steps)
        if batcher_of(variant) in LOCK_STEP
        else offered,
        "gpu_utilization": None,
        "gpu_memory_bytes": None,
        "cpu_percent": 187.4,
        "rss_bytes": 1_530_000_000,
    }
    for record in simulation.records:
        record |= {"run": run["id"], "id": f"{run['id']}/{record['id']}"}
        early, late = record["index"] < WARM_UP, record["index"] >= count + WARM_UP
        record["phase"] = "warm_up" if early else "cool_down" if late else "measured"
    for step in simulation.steps:
        step["run"] = run["id"]
    figure(run, simulation.records)
    _explain(run, simulation.records, simulation.steps)
    return run, simulation.records, simulation.steps


def figure(run: dict[str, Any], records: list[dict[str, Any]]) -> None:
    """Fill in what follows from the records of a run."""
    mine = [record for record in records if record["run"] == run["id"] and record["phase"] == "measured"]
    good = [record for record in mine if not record["error"]]
    streamed = [record for record in good if record["first"] is not None]
    gaps = [(b[0] - a[0]) * 1000 for record in streamed for a, b in itertools.pairwise(record["chunks"])]
    duration = max(r["last"] for r in mine) - min(r["sent"] for r in mine)
    codes = [record["error_code"] for record in mine]
    run |= {
        "requests": len(mine),
        "failures": len(mine) - len(good),
        "refusals": codes.count("UNAVAILABLE"),
        "cancelled": codes.count("CANCELLED"),
        "empty": codes.count("EMPTY"),
        "retries": sum(record["retries"] for record in mine),
        "duration_s": duration,
        "output_tokens_per_s": sum(record["output_tokens"] for record in good) / duration,
        "input_tokens_per_s": sum(record["input_tokens"] for record in good) / duration,
        "requests_per_s": len(good) / duration,
        "ttft_ms": spread([(r["first"] - r["sent"]) * 1000 for r in streamed]),
        "itl_ms": spread(gaps),
        "icl_ms": spread(gaps),
        "tpot_ms": spread([_tpot(r) for r in streamed if r["output_tokens"] > 1]),
        "e2e_ms": spread([(r["last"] - r["sent"]) * 1000 for r in good]),
        "ttft_intended_ms": spread([(r["first"] - r["intended"]) * 1000 for r in streamed]),
        "e2e_intended_ms": spread([(r["last"] - r["intended"]) * 1000 for r in good]),
        "queue_ms": spread([(r["last"] - r["sent"]) * 1000 - r["stats"]["inference_ms"] for r in good]),
        "tokens_per_chunk": 1.0 if streamed else None,
        "slo": {name: _attainment(limits, mine, duration) for name, limits in SLO.items()},
    }


def spread(values: list[float]) -> dict[str, float] | None:
    """Mean and interpolated percentiles."""
    if not values:
        return None
    ordered = sorted(values)

    def at(share: float) -> float:
        low = math.floor(share * (len(ordered) - 1))
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (share * (len(ordered) - 1) - low)

    return {"mean": statistics.fmean(ordered), "p50": at(0.5), "p90": at(0.9), "p99": at(0.99)}


def runs_of(results: dict[str, Any], variant: str, point: str = "c16", workload: str = "mixed") -> list[dict[str, Any]]:
    """All repeats of one variant at one point."""
    wanted = (variant, point, workload)
    return [run for run in results["runs"] if (run["variant"], run["point"], run["workload"]) == wanted]


def fail(
    results: dict[str, Any], requests: list[dict[str, Any]], runs: list[dict[str, Any]], count: int, error: str
) -> None:
    """Let the first `count` measured requests of each of these runs be refused."""
    for run in runs:
        mine = [r for r in requests if r["run"] == run["id"] and r["phase"] == "measured"]
        for record in mine[:count]:
            nothing = {"first": None, "chunks": [], "output_tokens": 0, "stats": None, "finish_reason": None}
            record |= nothing | {"error": error, "error_code": "UNAVAILABLE"}
        figure(run, requests)
        if count == len(mine):
            run |= {"slots": None, "request_time_ms": None}
    conclude(results, requests)


def _tpot(record: dict[str, Any]) -> float:
    return (record["last"] - record["first"]) * 1000 / (record["output_tokens"] - 1)


def _attainment(limits: dict[str, float | None], records: list[dict[str, Any]], duration: float) -> dict[str, float]:
    def good(record: dict[str, Any]) -> bool:
        if record["error"]:
            return False
        e2e = (record["last"] - record["sent"]) * 1000
        first = e2e if record["first"] is None else (record["first"] - record["sent"]) * 1000
        later = 0.0 if record["first"] is None or record["output_tokens"] < 2 else _tpot(record)
        pairs = ((first, limits["ttft"]), (later, limits["tpot"]), (e2e, limits["e2e"]))
        return all(limit is None or value <= limit for value, limit in pairs)

    count, sent, z = sum(map(good, records)), len(records), 1.96
    share = count / sent
    middle = (share + z * z / (2 * sent)) / (1 + z * z / sent)
    half = z / (1 + z * z / sent) * math.sqrt(share * (1 - share) / sent + z * z / (4 * sent * sent))
    interval = {"low": max(middle - half, 0.0), "high": min(middle + half, 1.0)}
    return {"good": count, "sent": sent, "attainment": share, **interval, "goodput_per_s": count / duration}


def _explain(run: dict[str, Any], records: list[dict[str, Any]], steps: list[dict[str, Any]]) -> None:
    def rows(key: str) -> int:
        return sum(step[key] for step in steps)

    slots = {
        "useful_decode": rows("decode_rows"),
        "useful_prefill": rows("prefill_rows"),
        "prompt_padding": rows("prompt_padding_rows"),
        "finished_rows": rows("finished_rows"),
        "recomputed": rows("recomputed_rows"),
        "unexplained": 0,
    }
    total = sum(slots.values())
    useful = slots["useful_decode"] + slots["useful_prefill"]
    held, room = sum(step["kv_tokens_held"] for step in steps), sum(step["kv_blocks_used"] for step in steps) * 16
    running = sum(step["run_s"] for step in steps)
    time = {
        "useful": running * useful / total,
        "wasted": running * (1 - useful / total),
        "scheduling": sum(step["schedule_s"] for step in steps),
        "bookkeeping": sum(step["update_s"] for step in steps),
        "messages": len(steps) * 0.0,
    }
    span = steps[-1]["start_s"] + steps[-1]["run_s"] + steps[-1]["schedule_s"] + steps[-1]["update_s"]
    run |= {
        "slots": slots | {"total": total},
        "engine_time_s": time | {"idle": span - sum(time.values()), "unexplained": 0.0, "total": span},
        "request_time_ms": _request_time(run, records),
        "useful_tokens": useful,
        "computed_tokens": total,
        "padding_fraction": 1 - useful / total,
        "kv_waste_fraction": 1 - held / room,
        "kv_peak_blocks": max(step["kv_blocks_used"] for step in steps),
        "preemptions": 0,
    }


def _request_time(run: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, float]:
    good = [record for record in records if record["phase"] == "measured" and not record["error"]]
    parts: dict[str, list[float]] = {}
    for record in good:
        stats = record["stats"]
        door = stats["arrival_s"] - CLOCK_OFFSET_S
        wait = {"static": "wait_batch", "dynamic": "wait_batch"}.get(run["model"], "wait_seats")
        explained = {
            "client": (record["sent"] - record["intended"]) * 1000,
            "triton_queue": (door - record["sent"] - NETWORK_S) * 1000 if run["model"] == "dynamic" else 0.0,
            **dict.fromkeys(
                ("wait_batch", "wait_step", "wait_seats", "wait_blocks", "wait_budget", "wait_priority"), 0.0
            ),
            wait: stats["queue_ms"],
            "prefill": stats["first_token_ms"] - stats["queue_ms"],
            "decode": stats["inference_ms"] - (stats["first_token_ms"] - stats["queue_ms"]),
            "held": stats["held_ms"],
            "delivery": 0.8,
        }
        total = (record["last"] - record["intended"]) * 1000
        for name, value in (explained | {"unexplained": total - sum(explained.values()), "total": total}).items():
            parts.setdefault(name, []).append(value)
    return {name: statistics.fmean(values) for name, values in parts.items()}


def _planned(variant: str) -> dict[str, Any]:
    executor = "transformers" if "transformers" in variant else "native"
    switches = dict(pair.split("=") for pair in variant.split(",")[1:] if "=" in pair)
    return {"name": variant, "model": batcher_of(variant), "executor": executor, "target": "grpc", "switches": switches}


def _described(workload: str, points: Sequence[str], count: int, seed: int) -> dict[str, Any]:
    sizes = lengths(workload, count + WARM_UP + COOL_DOWN, seed)
    inputs, outputs = [size for size, _ in sizes], [size for _, size in sizes]
    return {
        "name": workload,
        "seed": seed,
        "sha256": "9f2c" * 16,
        "requests": len(sizes),
        "input_tokens": {
            "mean": statistics.fmean(inputs),
            "min": min(inputs),
            "max": max(inputs),
            "total": sum(inputs),
        },
        "output_tokens": {
            "mean": statistics.fmean(outputs),
            "min": min(outputs),
            "max": max(outputs),
            "total": sum(outputs),
        },
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "offered": {point: f"{number:02d}ab" * 16 for number, point in enumerate(points)},
    }


def _tuning() -> dict[str, Any]:
    grid = [
        {
            "max_queue_delay_microseconds": delay,
            "max_batch_size": size,
            "output_tokens_per_s": rate,
            "mean_batch": batch,
            "failures": 0,
        }
        for delay, size, rate, batch in (
            (0, 8, 41.0, 4.1),
            (0, 16, 52.0, 7.0),
            (5000, 8, 48.0, 7.7),
            (5000, 16, 64.0, 14.9),
            (50000, 16, 61.0, 15.2),
        )
    ]
    chosen = {key: grid[3][key] for key in ("max_queue_delay_microseconds", "max_batch_size")}
    about = {"workload": "mixed", "concurrency": 16, "requests": 32}
    return about | {"variants": ["dynamic"], "tried_with": "dynamic", "grid": grid, "chosen": chosen}
