"""Three knees over the load: where throughput stops growing, where latency stops paying, where the SLO is missed.

Each is {"at": load, "confidence": how sure, "method": how found}, or {"at": None, "reason": why there is none}.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slipstream_client.comparison.segmented_fit import STRONG, fit_bends
from slipstream_client.comparison.slo import wilson_interval

LEAST_LOADS = 4
LEAST_RUNS = 6  # two more than a line with a bend has parameters
LEAST_ATTAINMENT = 0.9
_RESAMPLES = 500
_LOADS = {"closed": "concurrency", "open": "rate"}  # a load's kind, and its field on the horizontal axis

Knee = dict[str, Any]
Repeats = Sequence[Sequence[float]]  # of every load, one value for each of its runs


def knees(runs: Sequence[Mapping[str, Any]], slo: str | None = None, *, seed: int = 0) -> dict[str, dict[str, Knee]]:
    """Of every variant and workload, from the "runs" of results.json; `slo` names the one whose knee is wanted.

    Latency is the P99 of E2E from the intended time. A variant that was loaded in a closed loop and at rates is judged
    by the kind with more loads.
    """
    grouped: dict[str, dict[str, dict[float, list[Mapping[str, Any]]]]] = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        kinds = grouped[f"{run['variant']}/{run['workload']}"]
        kind = run["load"]["kind"]
        if kind in _LOADS and run.get("valid", True):
            kinds[kind].setdefault(float(run["load"][_LOADS[kind]]), []).append(run)
    return {name: _knees_of(max(kinds.values(), key=len, default={}), slo, seed) for name, kinds in grouped.items()}


def throughput_knee(loads: Sequence[float], throughputs: Repeats, *, seed: int = 0) -> Knee:
    """Where two lines meet that fit throughput over the ascending loads clearly better than one does."""
    if len(loads) < LEAST_LOADS:
        return _too_few(loads)
    x = np.repeat(np.array(loads, dtype=float), [len(repeats) for repeats in throughputs])
    y = _in_a_row(throughputs)
    if len(y) < LEAST_RUNS:
        return _none(f"{len(y)} runs are too few to tell two lines from one: {LEAST_RUNS} are needed")
    bend = fit_bends(x, y[None])[0]
    if bend.evidence < STRONG:
        return _none(
            f"one line fits throughput as well as two (BIC {bend.evidence:.1f} better, and {STRONG:g} is strong)"
        )
    if not bend.is_knee:
        slopes = f"from {bend.slope_before:.3g} to {bend.slope_after:.3g}"
        return _none(f"at {bend.at:.3g} the slope of throughput over load only changes {slopes}")
    again = [found.at for found in fit_bends(x, y[_repeat_draws(throughputs, seed)]) if found.is_knee]
    method = f"two-segment least-squares fit, its BIC better than a line's by {bend.evidence:.0f}"
    return {"at": bend.at, **_confidence(again, throughputs), "method": method}


def latency_knee(
    loads: Sequence[float], throughputs: Repeats, latencies: Sequence[Sequence[float | None]], *, seed: int = 0
) -> Knee:
    """The measured load with the largest power, throughput / latency (Kleinrock 1979).

    Up to there, one per cent of latency buys more than one per cent of throughput; behind it, less. That is where a ray
    from the origin touches the curve of latency over throughput, so it needs no limit and no choice of axes.
    """
    if len(loads) < LEAST_LOADS:
        return _too_few(loads)
    if any(latency is None for repeats in latencies for latency in repeats):
        return _none("in one of its runs no request was answered, so that it has no latency")
    starts = np.cumsum([0, *map(len, throughputs)])[:-1]
    runs = np.array([_in_a_row(throughputs), _in_a_row(latencies)])  # [2, runs]

    def largest_power(draws: np.ndarray) -> np.ndarray:
        """Place among the loads [rows], of each row of runs [rows, runs]."""
        throughput, latency = np.add.reduceat(runs[:, draws], starts, axis=2)  # each [rows, loads]
        return (throughput / latency).argmax(axis=1)

    place = int(largest_power(np.arange(runs.shape[1])[None])[0])
    if place == 0:
        return _none(f"beyond the lowest load, {loads[0]:g}, latency already grows faster than throughput")
    if place == len(loads) - 1:
        return _none(f"throughput grows faster than latency up to the highest load, {loads[-1]:g}")
    again = [loads[at] for at in largest_power(_repeat_draws(throughputs, seed)) if 0 < at < len(loads) - 1]
    return {"at": float(loads[place]), **_confidence(again, throughputs), "method": "largest throughput / latency"}


def slo_knee(loads: Sequence[float], good: Sequence[int], sent: Sequence[int]) -> Knee:
    """The largest load up to which every load surely attains the SLO: Wilson's lower bound is at least 0.9."""
    if not loads:
        return _none("no load was measured")
    intervals = [wilson_interval(*counts) for counts in zip(good, sent, strict=True)]
    seen = [
        f"{kept / total if total else 0:.1%} ({low:.1%} to {high:.1%}) at {load:g}"
        for load, kept, total, (low, high) in zip(loads, good, sent, intervals, strict=True)
    ]
    surely = [low >= LEAST_ATTAINMENT for low, _ in intervals]
    missed = surely.index(False) if False in surely else None
    if missed is None:
        return _none(f"attainment is surely {LEAST_ATTAINMENT:.0%} at every load: {seen[-1]}") | {
            "at_least": float(loads[-1])
        }
    if missed == 0:
        return _none(f"attainment is not surely {LEAST_ATTAINMENT:.0%} at the lowest load: {seen[0]}")
    return {
        "at": float(loads[missed - 1]),
        "confidence": f"attainment {seen[missed - 1]}, {seen[missed]}",
        "method": f"largest load whose attainment is at least {LEAST_ATTAINMENT} by the lower end of Wilson's interval",
    }


def _knees_of(runs_at: Mapping[float, Sequence[Mapping[str, Any]]], slo: str | None, seed: int) -> dict[str, Knee]:
    loads = sorted(runs_at)
    throughputs = [[run["output_tokens_per_s"] for run in runs_at[load]] for load in loads]
    latencies = [[(run["e2e_intended_ms"] or {}).get("p99") for run in runs_at[load]] for load in loads]
    found = {
        "throughput": throughput_knee(loads, throughputs, seed=seed),
        "latency": latency_knee(loads, throughputs, latencies, seed=seed),
    }
    if slo is None:
        return found | {"slo": _none("no target was given")}
    kept = {
        count: [sum(run["slo"][slo][count] for run in runs_at[load]) for load in loads] for count in ("good", "sent")
    }
    return found | {"slo": slo_knee(loads, kept["good"], kept["sent"]) | {"of": slo}}


def _repeat_draws(repeats: Repeats, seed: int) -> np.ndarray:
    """Which runs [resamples, runs], of all repeats in a row; at every load as many as there were, with replacement."""
    generator = np.random.default_rng(seed)
    starts = np.cumsum([0, *map(len, repeats)])
    drawn = [
        start + generator.integers(0, len(runs), (_RESAMPLES, len(runs)))
        for start, runs in zip(starts, repeats, strict=False)
    ]
    return np.concatenate(drawn, axis=1)


def _confidence(again: Sequence[float], repeats: Repeats) -> dict[str, Any]:
    """From where the resamples of the repeats have their knees."""
    if min(map(len, repeats)) < 2:
        return {"confidence": "unknown: a load was measured once", "share": None, "low": None, "high": None}
    share = len(again) / _RESAMPLES
    if not again:
        return {"confidence": "in no resample of the repeats", "share": 0.0, "low": None, "high": None}
    low, high = (float(at) for at in np.percentile(again, [2.5, 97.5]))
    text = f"in {share:.0%} of the resamples of the repeats, and there between {low:.3g} and {high:.3g}"
    return {"confidence": text, "share": share, "low": low, "high": high}


def _in_a_row(repeats: Sequence[Sequence[float | None]]) -> np.ndarray:
    return np.array([value for values in repeats for value in values], dtype=float)


def _too_few(loads: Sequence[float]) -> Knee:
    return _none(f"{len(loads)} loads were measured, and a knee needs {LEAST_LOADS}")


def _none(reason: str) -> Knee:
    return {"at": None, "reason": reason}
