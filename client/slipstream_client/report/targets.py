"""Latency targets: how many requests kept one, up to which load, by which limit they missed it, its name in words."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream_client.comparison.slo import wilson_interval
from slipstream_client.report.formats import duration, listed, percent
from slipstream_client.report.phases import tpot_s
from slipstream_client.report.study import Cell, Family, Load, Record, Study

HELD = 0.99  # the share of requests within the target from which a load counts as held
_LIMITS = {"ttft": "time to first token", "tpot": "time per further token", "e2e": "time of the whole answer"}


def held_load(study: Study, family: Family, variant: str, slo: str) -> Load | None:
    """The highest load up to which, from the lowest on, `HELD` of all requests sent meet the target."""
    held = None
    for load in family.loads:
        cell = study.cell(family.workload, load, variant)
        if cell is None:
            continue
        if (attained := attainment(cell, slo)) is None or attained < HELD:
            break
        held = load
    return held


def counts(cell: Cell, slo: str) -> tuple[int, int]:
    """Requests within the target and requests sent, over all repeats."""
    entries = [run["slo"][slo] for run in cell.runs if slo in (run.get("slo") or {})]
    return sum(entry["good"] for entry in entries), sum(entry["sent"] for entry in entries)


def attainment(cell: Cell, slo: str) -> float | None:
    """Requests within the target ÷ requests sent, over all repeats."""
    good, sent = counts(cell, slo)
    return good / sent if sent else None


def attained(cells: Sequence[Cell], slo: str) -> str:
    """The shares of some cells with their intervals, in words."""
    found = []
    for cell in cells:
        good, sent = counts(cell, slo)
        if sent:
            low, high = wilson_interval(good, sent)
            interval = f"{percent(low, 0)} to {percent(high, 0)}"
            found.append(f"{cell.variant} {percent(good / sent)} ({good} of {sent}, 95% interval {interval})")
    return "within the target " + listed(found)


def overlap(cell: Cell, other: Cell, slo: str) -> bool:
    """Whether the intervals of their shares have a value in common."""
    (low, high), (other_low, other_high) = (wilson_interval(*counts(each, slo)) for each in (cell, other))
    return low <= other_high and other_low <= high


def missed(cell: Cell, slo: str, limits: dict[str, float | None]) -> str:
    """ "2 of 96 missed (2 by the time to first token)": by which limit, where the records account for every miss."""
    good, sent = counts(cell, slo)
    by = [limit for record in cell.records if (limit := _limits_missed(record, limits))]
    told = [(words, sum(key in each for each in by)) for key, words in _LIMITS.items()]
    reasons = listed([f"{count} by the {words}" for words, count in told if count])
    return f"{sent - good} of {sent} missed" + (f" ({reasons})" if reasons and len(by) == sent - good else "")


def _limits_missed(record: Record, limits: dict[str, float | None]) -> set[str]:
    """Which limits an answered request went beyond: an answer in one piece has its first token at its end."""
    if record["error"] or record["last"] is None:
        return set()
    whole, first = record["last"] - record["intended"], record["first"]
    ttft = whole if first is None else first - record["intended"]
    times = {"ttft": ttft, "tpot": tpot_s(record) or 0.0, "e2e": whole}
    return {key for key, limit in limits.items() if limit is not None and times[key] * 1000 > limit}


def slo_words(limits: dict[str, float | None]) -> str:
    """ "first token within 2 s, 200 ms for each further token"."""
    words = {"ttft": "first token within {}", "tpot": "{} for each further token", "e2e": "whole answer within {}"}
    return ", ".join(words[key].format(duration(limit)) for key, limit in limits.items() if limit is not None)


def slo_named(name: str, limits: dict[str, float | None]) -> str:
    """ "“chat” (first token within 2 s)"; limits that were given as such have no other name."""
    return slo_words(limits) if ":" in name else f"“{name}” ({slo_words(limits)})"


def slo_title(name: str, limits: dict[str, float | None]) -> str:
    """What a target is called: a preset by its name, and limits that were given as such by themselves."""
    return slo_words(limits) if ":" in name else name
