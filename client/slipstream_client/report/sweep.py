"""The sweep over the variance of answer lengths: where a batcher stops paying."""

from __future__ import annotations

from slipstream_client.report.curves import line_of
from slipstream_client.report.formats import times
from slipstream_client.report.plot import Mark, Panel, Rule
from slipstream_client.report.study import SWEEP_PREFIX, Study
from slipstream_client.report.verdicts import difference


def sweep_panel(study: Study) -> Panel | None:
    """Throughput as a ratio to the baseline against how much output lengths vary; None without a sweep."""
    families = [f for f in study.families if f.workload.startswith(SWEEP_PREFIX)]
    if len({f.workload for f in families}) < 2:
        return None
    lines, floor = [], study.floor("output_tokens_per_s")
    for variant in study.variants:
        if variant == study.baseline:
            continue
        marks = []
        for family in families:
            variation = study.output_length_variation(family.workload)
            cell = study.cell(family.workload, family.loads[-1], variant)
            base = study.cell(family.workload, family.loads[-1], study.baseline)
            found = difference(study, cell, base, "output_tokens_per_s") if cell and base else None
            if cell and found and variation is not None:
                place = f"{variant}, {family.workload} at {cell.load.words}"
                tip = f"{place}: {times(found.ratio)} ({found.sure}), {_judged(found.verdict)}"
                marks.append(Mark(variation, found.ratio, tip, found.low, found.high, verdict=found.verdict))
        lines.append(line_of(study, variant, sorted(marks, key=lambda mark: mark.x)))
    band = (1 / (1 + floor), 1 + floor) if floor is not None else None
    return Panel(
        f"Useful tokens/s, as a ratio to {study.baseline}",
        "above 1 is better; the shaded band is the noise" if band else "above 1 is better",
        lines,
        x_title="standard deviation of output lengths ÷ their mean",
        rules=[Rule(1.0, "")],
        band=band,
        key="sweep",
    )


def sweep_sentences(study: Study) -> dict[str, str]:
    """For each variant by its name: the ratio with the least and the most variation, and from where on it pays."""
    panel = sweep_panel(study)
    said = {}
    for line in panel.lines if panel else ():
        if not line.marks:
            continue
        least, most = line.marks[0], line.marks[-1]
        paying = [mark.x for mark in line.marks if mark.verdict == "better"]
        if any(mark.verdict == "unknown" for mark in line.marks):
            pays = "how much of it is noise is not known"
        else:
            pays = f"better beyond the noise from {paying[0]:.2f} on" if paying else "never better beyond the noise"
        ends = f"{times(least.y)} {_varying(least.x)}, {times(most.y)} {_varying(most.x)}"
        said[line.name] = f"{ends}; {pays}."
    return said


def _varying(variation: float) -> str:
    return f"where answers vary by {variation:.2f} of their mean" if variation else "where all answers are equally long"


def _judged(verdict: str) -> str:
    return {"same": "no difference beyond the noise", "unknown": "the noise is not known"}.get(verdict, verdict)
