"""The one sentence that states what a comparison found, or why it cannot say."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream_client.report.batching import batching_doubt
from slipstream_client.report.series import (
    Run,
    baseline_name,
    figure,
    ratio,
    series_name,
    series_names,
    succeeded,
    tail_ms,
    tail_name,
)

# Closer than this is called the same: one run each does not resolve less on a machine with other work.
SAME_WITHIN = 0.05


def headline(results: dict, requests: Sequence[dict]) -> str:
    """What the comparison found at the highest concurrency that both sides of it ran.

    It never names a winner where requests failed or answers differed.
    """
    runs, quality = results["runs"], results["quality"]
    if not runs:
        return "Nothing was measured."
    names, base_name = series_names(runs), baseline_name(runs)
    if len(names) == 1:
        return _alone(max(runs, key=lambda run: run["concurrency"]))
    by_place = {(series_name(run), run["concurrency"]): run for run in runs}
    others = [name for name in names if name != base_name]
    subject_name = "continuous" if "continuous" in others else others[0]
    shared = [at for name, at in by_place if name == subject_name and (base_name, at) in by_place]
    if not shared:
        return f"Cannot say how {subject_name} compares with {base_name}: they ran at no concurrency in common."
    at = max(shared)
    assert base_name is not None  # there are runs
    subject, base = by_place[subject_name, at], by_place[base_name, at]
    cannot = f"Cannot say how {subject_name} compares with {base_name} at concurrency {at}: "
    failed = [run for run in (subject, base) if run["failures"]]
    if failed:
        return cannot + " and ".join(_failures(run) for run in failed) + "."
    if quality["different"] or (quality["compared"] and not quality["equal"]):
        count = len(quality["different"]) or "some"
        return cannot + f"the batchers gave different answers ({count} of {quality['compared']} comparisons)."
    unchecked = "" if quality["compared"] else " The answers were not compared, so equal work is assumed, not shown."
    doubts = "".join(f" But {doubt}." for run in (subject, base) if (doubt := batching_doubt(run)))
    return _verdict(subject, base, requests) + unchecked + doubts


def _alone(run: Run) -> str:
    name, at = series_name(run), run["concurrency"]
    if run["failures"]:
        return f"At concurrency {at}, {_failures(run)}; only one batcher ran, so nothing is compared."
    mean = figure(run, "e2e_ms", "mean")
    latency = "" if mean is None else f", with a mean end-to-end latency of {mean:,.0f} ms"
    rate = run["output_tokens_per_s"] or 0
    return f"At concurrency {at}, {name} delivered {rate:,.0f} useful tokens/s{latency}; nothing else ran beside it."


def _failures(run: Run) -> str:
    return f"{run['failures']} of {run['requests']} requests of {series_name(run)} failed"


def _verdict(subject: Run, base: Run, requests: Sequence[dict]) -> str:
    name, base_name, at = series_name(subject), series_name(base), subject["concurrency"]
    rate, base_rate = subject["output_tokens_per_s"], base["output_tokens_per_s"]
    gain = ratio(rate, base_rate)
    if gain is None or not succeeded(subject):
        return f"Cannot say how {name} compares with {base_name} at concurrency {at}: no request was answered."
    rates = f"{rate:,.0f} against {base_rate:,.0f}"
    if abs(gain - 1) <= SAME_WITHIN:
        found = f"{name} delivered about the same useful tokens/s as {base_name} ({times(gain)}, {rates})"
    elif gain > 1:
        found = f"{name} delivered {times(gain)} the useful tokens/s of {base_name} ({rates})"
    else:
        found = f"{name} was slower: {times(gain)} the useful tokens/s of {base_name} ({rates})"
    mean = ratio(figure(subject, "e2e_ms", "mean"), figure(base, "e2e_ms", "mean"))
    tail = ratio(tail_ms(subject, "e2e_ms", requests), tail_ms(base, "e2e_ms", requests))
    latency = ""
    if mean is not None and tail is not None:
        tail_word = "P99" if tail_name(subject) == tail_name(base) == "P99" else "longest request"
        latency = f", with {times(mean)} its mean end-to-end latency and {times(tail)} its {tail_word}"
    return f"At concurrency {at}, {found}{latency}."


def times(value: float) -> str:
    """A ratio as people say it: "3.1x", "0.27x", "12x"."""
    return f"{value:.0f}x" if value >= 9.95 else f"{value:.1f}x" if value >= 1.95 else f"{value:.2f}x"
