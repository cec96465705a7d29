"""What a comparison found, in one sentence and one paragraph; or why it cannot say."""

from __future__ import annotations

from slipstream_client.report.batching import batching_doubt
from slipstream_client.report.explain import slots_reason, time_reason
from slipstream_client.report.formats import listed, percent, short, times
from slipstream_client.report.study import SUBJECT, SWEEP_PREFIX, Cell, Study
from slipstream_client.report.sweep import sweep_sentences
from slipstream_client.report.verdicts import Difference, difference

SMALL_VARIATION = 0.05  # output lengths that vary by less than this share of their mean are called equal


def headline(study: Study) -> str:
    """One sentence: the subject against the baseline at the highest load that both ran.

    It never names a winner where requests failed, answers differ or the point is invalid.
    """
    if not study.runs:
        return "Nothing was measured."
    if len(study.variants) == 1:
        return _alone(study)
    subject, base = subject_and_base(study)
    if subject is None or base is None:
        other = _subject_name(study)
        return f"Cannot say how {other} compares with {study.baseline}: they ran at no load in common."
    if cannot := _cannot(study, subject, base):
        return cannot
    return _verdict(study, subject, base)


def paragraph(study: Study) -> list[str]:
    """The sentences after the headline: why, where it makes no difference, and how sure all this is."""
    subject, base = subject_and_base(study)
    if subject is None or base is None:
        return []
    said = []
    if not _cannot(study, subject, base):
        reasons = [slots_reason(subject, base), time_reason(subject, base)]
        said += [f"Why: {reason}." for reason in reasons[:1] if reason]
        said += [f"{reason[0].upper()}{reason[1:]}." for reason in reasons[1:] if reason]
        said += _lowest_load(study, subject)
        said += _other_workloads(study, subject)
        said += _equal_lengths(study, subject)
        said += _sweep(study, subject)
    said += [f"But {doubt}." for cell in (subject, base) if (doubt := batching_doubt(cell))]
    return [*said, how_sure(study), _answers(study)]


def how_sure(study: Study) -> str:
    """The noise floor in words: that of the means, by which every ratio is judged."""
    floor = study.floor("output_tokens_per_s")
    if study.repeats < 2:
        return "Each figure is of one run, so the noise is not known and small differences mean nothing."
    if floor is None:
        return f"Each figure is the mean of {study.repeats} repeats; the noise was not measured."
    tail = study.floor("e2e_p99_ms")
    also = f" ({percent(tail)} in P99 latency)" if tail is not None else ""
    return (
        f"Each figure is the mean of {study.repeats} repeats, the variants in turn. The noise floor is "
        f"{percent(floor)} in tokens/s{also}: two such means of one variant differ by less in 95 of 100 cases, and a "
        "difference that this explains is called the same."
    )


def subject_and_base(study: Study) -> tuple[Cell | None, Cell | None]:
    """The two cells that the headline speaks of."""
    name, family = _subject_name(study), study.main
    for load in reversed(family.loads if family else ()):
        assert family is not None
        subject, base = study.cell(family.workload, load, name), study.cell(family.workload, load, study.baseline)
        if subject and base:
            return subject, base
    return None, None


def _subject_name(study: Study) -> str:
    others = [name for name in study.variants if name != study.baseline]
    return SUBJECT if SUBJECT in others else next(iter(others), study.baseline)


def _alone(study: Study) -> str:
    assert study.main is not None
    (name,) = study.variants
    load = study.main.loads[-1]
    cell = study.cell(study.main.workload, load, name)
    assert cell is not None
    if cell.problem:
        return f"No figure of {name} stands: {cell.problem}; only one variant ran, so nothing is compared."
    rate, mean = cell.metric("output_tokens_per_s") or 0, cell.metric("e2e_mean_ms")
    latency = "" if mean is None else f", with a mean end-to-end latency of {mean:,.0f} ms"
    return f"At {load.words}, {name} delivered {short(rate)} useful tokens/s{latency}; nothing else ran beside it."


def _cannot(study: Study, subject: Cell, base: Cell) -> str:
    problems = [cell.problem for cell in (subject, base) if cell.problem]
    quality = study.results["quality"]
    if not problems and (quality["different"] or quality["equal"] is False):
        count = len(quality["different"]) or "some"
        problems = [f"the batchers gave different answers ({count} of {quality['compared']} comparisons)"]
    place = f"Cannot say how {subject.variant} compares with {base.variant} at {subject.load.words}: "
    return f"{place}{listed(problems)}." if problems else ""


def _verdict(study: Study, subject: Cell, base: Cell) -> str:
    gain = difference(study, subject, base, "output_tokens_per_s")
    at = f"At {subject.load.words} (workload {subject.workload})"
    if gain is None:
        pair = f"{subject.variant} compares with {base.variant}"
        return f"Cannot say how {pair} at {subject.load.words}: no request was answered."
    rates = (
        f"{short(subject.metric('output_tokens_per_s') or 0)} against {short(base.metric('output_tokens_per_s') or 0)}"
    )
    return f"{at}, {_found(subject, base, gain, rates)}{_latency(study, subject, base)}."


def _found(subject: Cell, base: Cell, gain: Difference, rates: str) -> str:
    """The throughput part of the verdict."""
    if gain.verdict == "same" and gain.hides_much:
        return (
            f"whether {subject.variant} delivers other useful tokens/s than {base.variant} cannot be told: what was "
            f"seen ({times(gain.ratio)}, {rates}; {gain.sure}) lies within the noise, which is large"
        )
    if gain.verdict == "same":
        return (
            f"{subject.variant} and {base.variant} deliver the same useful tokens/s: no difference beyond the noise "
            f"({times(gain.ratio)}, {rates}; {gain.sure})"
        )
    slower = f"{subject.variant} was slower: {times(gain.ratio)} the useful tokens/s of {base.variant}"
    faster = f"{subject.variant} delivered {times(gain.ratio)} the useful tokens/s of {base.variant}"
    return f"{faster if gain.ratio > 1 else slower} ({rates}; {gain.sure})"


def _latency(study: Study, subject: Cell, base: Cell) -> str:
    mean = difference(study, subject, base, "e2e_mean_ms")
    if mean is None:
        return ""
    if mean.verdict == "same":
        return ", with no difference in mean end-to-end latency beyond the noise"
    tail = difference(study, subject, base, "e2e_p99_ms")
    named = subject.tail_name == base.tail_name == "P99"
    also = f" and {times(tail.ratio)} its P99" if tail and named and tail.verdict != "same" else ""
    return f", with {times(mean.ratio)} its mean end-to-end latency{also}"


def _lowest_load(study: Study, subject: Cell) -> list[str]:
    assert study.main is not None
    low = study.main.loads[0]
    mine, base = study.cell(subject.workload, low, subject.variant), study.cell(subject.workload, low, study.baseline)
    if low == subject.load or not mine or not base or mine.problem or base.problem:
        return []
    gain = difference(study, mine, base, "output_tokens_per_s")
    return [f"At {low.words} {_short(mine, gain)}."] if gain else []


def _other_workloads(study: Study, subject: Cell) -> list[str]:
    said = []
    for workload in study.workloads:
        if workload == subject.workload or workload.startswith(SWEEP_PREFIX):
            continue
        pair = _pair(study, workload, subject.variant)
        if pair and (gain := difference(study, *pair, "output_tokens_per_s")):
            said.append(f"On {workload} at {pair[0].load.words} {_short(pair[0], gain)}.")
    return said


def _equal_lengths(study: Study, subject: Cell) -> list[str]:
    """What is left of the gain where all answers are equally long."""
    for workload in study.workloads:
        variation = study.output_length_variation(workload)
        if variation is None or variation > SMALL_VARIATION:
            continue
        pair = _pair(study, workload, subject.variant)
        if pair and (gain := difference(study, *pair, "output_tokens_per_s")):
            words = _short(pair[0], gain)
            small = (
                ""
                if gain.verdict == "same" or abs(gain.ratio - 1) > 0.5
                else ", a small gain"
                if gain.ratio > 1
                else ""
            )
            return [f"Where all answers are equally long ({workload}, at {pair[0].load.words}) {words}{small}."]
    return []


def _sweep(study: Study, subject: Cell) -> list[str]:
    found = sweep_sentences(study).get(subject.variant)
    return [f"How much answers vary decides what {subject.variant} delivers: {found}"] if found else []


def _pair(study: Study, workload: str, name: str) -> tuple[Cell, Cell] | None:
    """Subject and baseline of another workload at its highest load, where nothing speaks against either."""
    for family in study.families:
        if family.workload != workload:
            continue
        for load in reversed(family.loads):
            mine, base = study.cell(workload, load, name), study.cell(workload, load, study.baseline)
            if mine and base:
                return None if mine.problem or base.problem else (mine, base)
    return None


def _short(cell: Cell, gain: Difference) -> str:
    if gain.verdict == "same":
        return f"there is no difference beyond the noise ({times(gain.ratio)})"
    interval = f" ({gain.interval})" if gain.interval else ""
    return f"{cell.variant} delivers {times(gain.ratio)} as much{interval}"


def _answers(study: Study) -> str:
    quality = study.results["quality"]
    if not quality["compared"]:
        return "The answers were not compared, so equal work is assumed, not shown."
    if quality["different"] or quality["equal"] is False:
        return f"{len(quality['different']) or 'Some'} of {quality['compared']:,} compared answers differ."
    return f"All {quality['compared']:,} compared answers are equal, so all did the same work."
