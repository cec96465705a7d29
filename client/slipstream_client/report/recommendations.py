"""Three answers: which variant for offline work, for a few users, and for many users with a latency target.

Each names its reason and how sure it is; none is given where requests failed, answers differ or points are invalid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream_client.report.batching import batching_doubt
from slipstream_client.report.explain import slots_reason, time_reason
from slipstream_client.report.formats import duration, listed, percent, short, times
from slipstream_client.report.study import SUBJECT, Cell, Family, Load, Study
from slipstream_client.report.targets import (
    HELD,
    attained,
    attainment,
    held_load,
    missed,
    overlap,
    slo_title,
    slo_words,
)
from slipstream_client.report.verdicts import LARGE_FLOOR, Difference, difference

FEW = 4  # clients: up to as many, a second load belongs to a few users too


@dataclass(frozen=True)
class Recommendation:
    """One answer. `pick` is empty where there is none to give."""

    use: str
    pick: str
    found: str
    reason: str
    sure: str


def recommendations(study: Study) -> list[Recommendation]:
    """Offline work, a few users, many users; none where nothing can be compared."""
    family = study.main
    if family is None or len(study.variants) < 2:
        return []
    return [_offline(study, family), _few_users(study, family), _many_users(study, _users_family(study, family))]


def _refused(use: str, problems: Sequence[str]) -> Recommendation:
    return Recommendation(use, "", "No winner is named: " + "; ".join(dict.fromkeys(problems)) + ".", "", "")


def _problems(study: Study, cells: Sequence[Cell]) -> list[str]:
    quality = study.results["quality"]
    different = ["the batchers gave different answers"] if quality["different"] or quality["equal"] is False else []
    doubts = [doubt for cell in cells if cell.load.at > 1 and (doubt := batching_doubt(cell))]
    return different + [cell.problem for cell in cells if cell.problem] + doubts


def _offline(study: Study, family: Family) -> Recommendation:
    use = "Offline work"
    ends = study.cells(family.workload, family.loads[-1])
    best: dict[str, Cell] = {}
    for load in family.loads:
        for cell in study.cells(family.workload, load):
            rate = cell.metric("output_tokens_per_s") or 0.0
            if cell.variant not in best or rate > (best[cell.variant].metric("output_tokens_per_s") or 0.0):
                best[cell.variant] = cell
    if problems := _problems(study, [*ends, *best.values()]):
        return _refused(use, problems)
    ranked = sorted(best.values(), key=lambda cell: -(cell.metric("output_tokens_per_s") or 0.0))
    first, tied, rest, closest = _ranking(study, ranked, "output_tokens_per_s")
    rates = [f"{short(cell.metric('output_tokens_per_s') or 0)} of {cell.variant}" for cell in ranked[1:]]
    most = short(first.metric("output_tokens_per_s") or 0)
    found = (
        f"{first.variant} delivers the most useful tokens/s on {family.workload}: {most} "
        f"(at {first.load.words}), against {listed(rates)}; each at its best load."
    )
    return Recommendation(
        use,
        _pick(study, first, tied),
        found,
        _slots_reason(study, family, first, rest),
        _sure(study, first, tied, rest, closest, "output_tokens_per_s"),
    )


def _slots_reason(study: Study, family: Family, first: Cell, rest: Sequence[Cell]) -> str:
    """At the highest load, where the headline speaks of the same."""
    load = family.loads[-1]
    best = study.cell(family.workload, load, first.variant)
    last = study.cell(family.workload, load, rest[-1].variant) if rest else None
    reason = slots_reason(best, last) if best and last else None
    return f"At {load.words}, {reason}." if reason else ""


def _few_users(study: Study, family: Family) -> Recommendation:
    use = f"A few users ({family.loads[0].words})"
    cells = study.cells(family.workload, family.loads[0])
    if problems := _problems(study, cells):
        return _refused(use, problems)
    ranked = _ascending(cells, "e2e_mean_ms")
    if len(ranked) < 2:
        return _refused(use, [f"nothing to compare at {family.loads[0].words}"])
    first, tied, rest, closest = _ranking(study, ranked, "e2e_mean_ms")
    means = [f"{duration(cell.metric('e2e_mean_ms'))} of {cell.variant}" for cell in ranked[1:]]
    at = family.loads[0].words
    found = (
        f"At {at} on {family.workload}, a whole answer takes {duration(first.metric('e2e_mean_ms'))} "
        f"with {first.variant}, against {listed(means)}."
    )
    found += _next_few(study, family)
    equals = [first, *tied]
    streaming = _ascending(equals, "ttft_mean_ms")
    if tied and streaming and len(streaming) < len(equals):
        first_tokens = listed([f"{duration(c.metric('ttft_mean_ms'))} with {c.variant}" for c in streaming])
        silent = listed([c.variant for c in equals if c not in streaming])
        reason = f"Of these, the first token shows after {first_tokens}; {silent} show nothing before the whole answer."
        lead, near, _, _ = _ranking(study, streaming, "ttft_mean_ms")
        sure = f"In the time of a whole answer: {_lower(_sure(study, first, tied, rest, closest, 'e2e_mean_ms'))}"
        return Recommendation(use, _pick(study, lead, near), found, reason, sure)
    reason = _sentence(time_reason(first, rest[-1])) if rest else ""
    return Recommendation(
        use, _pick(study, first, tied), found, reason, _sure(study, first, tied, rest, closest, "e2e_mean_ms")
    )


def _next_few(study: Study, family: Family) -> str:
    """The result at the second load, where that is one of a few users as well."""
    load = family.loads[1] if len(family.loads) > 1 else None
    cells = study.cells(family.workload, load) if load else []
    if load is None or load.at > FEW or _problems(study, cells):
        return ""
    ranked = _ascending(cells, "e2e_mean_ms")
    takes = listed([f"{duration(cell.metric('e2e_mean_ms'))} with {cell.variant}" for cell in ranked])
    if len(ranked) < 2:
        return ""
    first, tied, _, _ = _ranking(study, ranked, "e2e_mean_ms")
    equal = f"; the noise cannot tell {listed(_names(study, [first, *tied]))} apart" if tied else ""
    return f" At {load.words} it takes {takes}{equal}."


def _users_family(study: Study, family: Family) -> Family:
    """Users come by themselves, whoever still waits: the open loop of that workload where it was measured."""
    return next((f for f in study.families if (f.workload, f.kind) == (family.workload, "open")), family)


def _many_users(study: Study, family: Family) -> Recommendation:
    use = "Many users with a P99 target"
    everything = [cell for load in family.loads for cell in study.cells(family.workload, load)]
    quality = _problems(study, [])
    invalid = [cell.problem for cell in everything if cell.invalid_because and cell.problem]
    if quality or invalid:
        return _refused(use, quality + invalid)
    name = next(iter(study.slo), None)
    if name is None:
        return _by_tail(study, family, use)
    held = {variant: held_load(study, family, variant, name) for variant in study.variants}
    reached = {variant: load for variant, load in held.items() if load}
    limits = study.slo[name]
    title, words = slo_title(name, limits), slo_words(limits)
    target = f"the target “{title}”" + (f" ({words})" if title != words else "")
    if not reached:
        top = attained(study.cells(family.workload, family.loads[0]), name)
        lowest = family.loads[0].words
        found = f"None keeps {target} for {HELD:.0%} of its requests at any load tried, down to {lowest}: {top}."
        return Recommendation(use, "", found, "", "")
    most = max(load.at for load in reached.values())
    winners = [variant for variant, load in reached.items() if load.at == most]
    held_words = [f"{variant} up to {load.words}" for variant, load in reached.items()]
    without = [
        variant
        for variant in study.variants
        if variant not in reached and any(c.variant == variant for c in everything)
    ]
    never = f"; {listed(without)} at none of the loads tried" if without else ""
    found = (
        f"Loads at which {HELD:.0%} of the requests meet {target} on {family.workload}: {listed(held_words)}{never}."
    )
    at = reached[winners[0]]
    cells = {cell.variant: cell for cell in study.cells(family.workload, at)}
    if problems := [problem for variant in winners if (problem := cells[variant].problem)]:
        return _refused(use, problems)
    tails = sorted((cells[variant] for variant in winners), key=lambda cell: cell.metric("e2e_p99_ms") or 0.0)
    best, tied, slower, _ = _ranking(study, tails, "e2e_p99_ms")
    if slower:
        shortest = duration(best.tail_ms("e2e_ms"))
        found += f" Of these {_pick(study, best, tied)} has the shortest tail there ({shortest})."
    others = [cell for variant, cell in cells.items() if variant not in winners and attainment(cell, name) is not None]
    near = [cell for cell in others if not cell.problem and overlap(cell, best, name)]
    for cell in near:
        found += f" {cell.variant} cannot be told apart at {at.words}: {missed(cell, name, limits)}."
    failing = [cell for cell in others if cell not in near]
    closest = max(failing, key=lambda c: (attainment(c, name) or 0.0, -(c.tail_ms("e2e_ms") or 0.0)), default=None)
    reason = _sentence(time_reason(best, closest)) if closest else ""
    sure = attained(list(cells.values()), name)
    steps = "" if at == family.loads[-1] else f" The next load tried, {_next(family, at).words}, is beyond all of them."
    if at == family.loads[-1]:
        steps = " It is the highest load tried, so the limit may lie higher."
    pick = listed([*_names(study, [best, *tied]), *(cell.variant for cell in near)], "or")
    return Recommendation(use, pick, found, reason, f"At {at.words}: {sure}.{steps}")


def _by_tail(study: Study, family: Family, use: str) -> Recommendation:
    cells = study.cells(family.workload, family.loads[-1])
    if problems := _problems(study, cells):
        return _refused(use, problems)
    ranked = _ascending(cells, "e2e_p99_ms")
    if len(ranked) < 2:
        return _refused(use, [f"nothing to compare at {family.loads[-1].words}"])
    first, tied, rest, closest = _ranking(study, ranked, "e2e_p99_ms")
    tails = [f"{duration(cell.tail_ms('e2e_ms'))} of {cell.variant}" for cell in ranked[1:]]
    found = (
        f"No target was given. At {family.loads[-1].words} on {family.workload} the tail ({first.tail_name}) "
        f"of {first.variant} is {duration(first.tail_ms('e2e_ms'))}, against {listed(tails)}."
    )
    reason = _sentence(time_reason(first, rest[-1])) if rest else ""
    return Recommendation(
        use, _pick(study, first, tied), found, reason, _sure(study, first, tied, rest, closest, "e2e_p99_ms")
    )


def _next(family: Family, load: Load) -> Load:
    return family.loads[min(list(family.loads).index(load) + 1, len(family.loads) - 1)]


def _ascending(cells: Sequence[Cell], metric: str) -> list[Cell]:
    """Those that have a value of a latency, the shortest first."""
    return sorted((cell for cell in cells if cell.metric(metric)), key=lambda cell: cell.metric(metric) or 0.0)


def _ranking(
    study: Study, ranked: Sequence[Cell], metric: str
) -> tuple[Cell, list[Cell], list[Cell], Difference | None]:
    """The best, those no different from it beyond the noise, the others, and the best against the closest of these."""
    first, tied, rest, closest = ranked[0], [], [], None
    for cell in ranked[1:]:
        found = difference(study, first, cell, metric)
        if found and found.verdict == "same":
            tied.append(cell)
        else:
            rest.append(cell)
            closest = closest or found
    return first, tied, rest, closest


def _pick(study: Study, first: Cell, tied: Sequence[Cell]) -> str:
    return listed(_names(study, [first, *tied]), "or")


def _names(study: Study, equals: Sequence[Cell]) -> list[str]:
    """Those that the noise cannot tell apart: the subject of the comparison first, the others as planned."""
    return sorted((cell.variant for cell in equals), key=lambda name: (name != SUBJECT, study.variants.index(name)))


def _sure(
    study: Study, first: Cell, tied: Sequence[Cell], rest: Sequence[Cell], closest: Difference | None, metric: str
) -> str:
    said = []
    if tied:
        said.append(f"No difference beyond the noise between {listed([first.variant, *(c.variant for c in tied)])}.")
        floor = study.floor(metric)
        if floor is not None and floor > LARGE_FLOOR:
            said.append(f"But the noise is large: a floor of {percent(floor)} hides any difference smaller than that.")
    if rest and closest is not None:
        against = f"{first.variant} against {rest[0].variant}, the next"
        said.append(f"{against}: {times(closest.ratio)} ({closest.sure}).")
    return " ".join(said)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _sentence(text: str | None) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""
