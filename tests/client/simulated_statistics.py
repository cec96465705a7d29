"""What the runs of a simulated comparison say together: noise, comparisons, intervals, knees; by simple rules."""

from __future__ import annotations

import math
import statistics
from typing import Any

METRICS = {
    "output_tokens_per_s": ("output_tokens_per_s", None),
    "e2e_mean_ms": ("e2e_ms", "mean"),
    "e2e_p99_ms": ("e2e_ms", "p99"),
    "ttft_mean_ms": ("ttft_ms", "mean"),
    "ttft_p99_ms": ("ttft_ms", "p99"),
}


def conclude(results: dict[str, Any], requests: list[dict[str, Any]]) -> None:
    """Fill in what follows from the runs: noise, comparisons, knees, quality."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for run in results["runs"]:
        groups.setdefault((run["workload"], run["point"], run["variant"]), []).append(run)
    repeated = [runs for runs in groups.values() if len(runs) > 1]
    results["noise"] = {"runs_compared": sum(map(len, repeated)), "metrics": {}}
    for metric in METRICS:
        values = [[value for run in runs if (value := value_of(run, metric))] for runs in repeated]
        shares = [statistics.variance(v) / statistics.fmean(v) ** 2 for v in values if len(v) > 1]
        if shares:
            floor = 1.96 * math.sqrt(2 * statistics.fmean(shares))
            results["noise"]["metrics"][metric] = {"floor": floor, "degrees_of_freedom": len(shares)}
    base_name = results["plan"]["baseline"]
    results["comparisons"] = [
        _compared(runs, groups[workload, point, base_name], results["noise"]["metrics"], requests)
        for (workload, point, variant), runs in groups.items()
        if variant != base_name and (workload, point, base_name) in groups
    ]
    results["knees"] = {}
    for workload, variant in dict.fromkeys((run["workload"], run["variant"]) for run in results["runs"]):
        here = [
            runs for (w, _, v), runs in groups.items() if (w, v) == (workload, variant) and runs[0]["point"][0] == "c"
        ]
        results["knees"][f"{variant}/{workload}"] = _knees(here)
    compared = max(len(results["runs"]) - 1, 0) * (results["runs"][0]["requests"] if results["runs"] else 0)
    results["quality"] = {"equal": True if compared else None, "compared": compared, "different": [], "agreement": {}}
    results["intervals"] = [
        {
            "workload": workload,
            "point": point,
            "variant": variant,
            "repeats": len(runs),
            "metrics": {metric: _interval(runs, metric) for metric in METRICS},
        }
        for (workload, point, variant), runs in groups.items()
    ]


def value_of(run: dict[str, Any], metric: str) -> float | None:
    """One of `METRICS` of a run."""
    field, statistic = METRICS[metric]
    return run[field] if statistic is None else (run[field] or {}).get(statistic)


def _interval(runs: list[dict[str, Any]], metric: str) -> dict[str, float | None]:
    """A little wider than the span of the repeats."""
    values = [value for run in runs if (value := value_of(run, metric))]
    if not values:
        return {"value": None, "low": None, "high": None}
    return {"value": statistics.fmean(values), "low": min(values) * 0.99, "high": max(values) * 1.01}


def _compared(
    runs: list[dict[str, Any]], base: list[dict[str, Any]], noise: dict[str, Any], requests: list[dict[str, Any]]
) -> dict[str, Any]:
    metrics = {}
    for metric in METRICS:
        mine = [value for run in runs if (value := value_of(run, metric))]
        theirs = [value for run in base if (value := value_of(run, metric))]
        if not mine or not theirs:
            continue
        value, other = statistics.fmean(mine), statistics.fmean(theirs)
        floor = None
        if metric in noise:
            one = math.log1p(noise[metric]["floor"])
            floor = math.expm1(one * math.sqrt((1 / len(mine) + 1 / len(theirs)) / 2))
        inside = floor is not None and abs(math.log(value / other)) <= math.log1p(floor)
        better = (value > other) == (metric == "output_tokens_per_s")
        metrics[metric] = {
            "value": value,
            "base": other,
            "ratio": value / other,
            "low": min(mine) / max(theirs),
            "high": max(mine) / min(theirs),
            "noise": floor,
            "verdict": "unknown" if floor is None else "same" if inside else "better" if better else "worse",
            "superiority": None,
        }
    place = {key: runs[0][key] for key in ("workload", "point", "variant")}
    return place | {"baseline": base[0]["variant"], "metrics": metrics}


def _knees(groups: list[list[dict[str, Any]]]) -> dict[str, Any]:
    if len(groups) < 3:
        return {"throughput": None, "latency": None, "slo": None}
    rates = [(g[0]["load"]["concurrency"], statistics.fmean(r["output_tokens_per_s"] for r in g)) for g in groups]
    most = max(rate for _, rate in rates)
    at = next(clients for clients, rate in rates if rate >= 0.85 * most)
    held = [g[0]["load"]["concurrency"] for g in groups if all(r["slo"]["chat"]["attainment"] >= 0.99 for r in g)]
    return {
        "throughput": {"at": at, "confidence": "found in 9 of 10 resamples of the repeats"},
        "latency": None,
        "slo": {"at": max(held), "confidence": "the same in every repeat"} if held else None,
    }
