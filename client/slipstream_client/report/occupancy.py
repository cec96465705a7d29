"""How full the engine was, and what its KV cache held, over the time of one run; from its step records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from slipstream_client.report.formats import number
from slipstream_client.report.study import Cell, Step, Study

SLICES = 240  # of the time axis; each shows the mean over its time
TIPS = 24


@dataclass(frozen=True)
class Slice:
    """Means over a slice of time."""

    working: float = 0.0  # rows of requests that are not finished
    finished: float = 0.0  # rows whose answer is complete, and which are computed all the same
    waiting: float = 0.0
    blocks: float = 0.0
    held: float = 0.0  # tokens


_COLUMNS = tuple(column.name for column in fields(Slice))


@dataclass(frozen=True)
class Strip:
    """One variant: paths in a drawing of `SLICES` x 100, and what the pointer shows."""

    cell: Cell
    seats: int | None
    working: str
    finished: str
    blocks: str
    held: str  # empty where the block size is not known
    tips: Sequence[tuple[float, float, str]]  # left and width in per cent, text
    mean_working: float  # over the time of its run


@dataclass(frozen=True)
class Occupancy:
    """Strips on one time axis and one scale each for rows and blocks."""

    span: float
    most_rows: float
    most_blocks: float
    strips: Sequence[Strip]


def occupancy(study: Study, cells: Sequence[Cell]) -> Occupancy:
    """Of the first repeat of each cell that has step records."""
    shown = [(cell, steps) for cell in cells if (steps := study.steps(cell.runs[0]))]
    span = max((_end(steps[-1]) for _, steps in shown), default=0.0)
    block_size = _parameter(study, "block_size", None)
    sliced = [(cell, steps, _slices(steps, span)) for cell, steps in shown]
    seats = {cell.variant: _parameter(study, "max_num_seqs", cell.runs[0]["model"]) for cell, _ in shown}
    rows = [s.working + s.finished for _, _, slices in sliced for s in slices]
    most_rows = max([*rows, *(known for known in seats.values() if known)], default=1.0) or 1.0
    most_blocks = max((s.blocks for _, _, slices in sliced for s in slices), default=1.0) or 1.0
    strips = []
    for cell, steps, slices in sliced:
        finished = [s.working + s.finished for s in slices] if any(s.finished for s in slices) else []
        time = _end(steps[-1])
        strips.append(
            Strip(
                cell=cell,
                seats=seats[cell.variant],
                working=_area([s.working for s in slices], most_rows),
                finished=_area(finished, most_rows),
                blocks=_area([s.blocks for s in slices], most_blocks),
                held=_area([s.held / block_size for s in slices], most_blocks) if block_size else "",
                tips=_tips(slices, span, block_size),
                mean_working=sum(step["running"] * _length(step) for step in steps) / time if time else 0.0,
            )
        )
    return Occupancy(span, most_rows, most_blocks, strips)


def _parameter(study: Study, name: str, model: str | None) -> int | None:
    """A number of the engine's configuration; where the models differ, that of one."""
    value: Any = ((study.results.get("environment") or {}).get("engine") or {}).get(name)
    if isinstance(value, dict):
        value = value.get(model) if model else next(iter(value.values()), None)
    return int(value) if str(value).isdigit() else None


def _length(step: Step) -> float:
    return step["schedule_s"] + step["run_s"] + step["update_s"]


def _end(step: Step) -> float:
    return step["start_s"] + _length(step)


def _slices(steps: Sequence[Step], span: float) -> list[Slice]:
    """Weighted by time; between two steps the engine held nothing in computation."""
    totals = [[0.0] * len(_COLUMNS) for _ in range(SLICES)]
    width = span / SLICES
    for step in steps:
        start, end = max(step["start_s"], 0.0), min(_end(step), span)
        values = (
            step["running"],
            step["finished_rows"],
            step["waiting"],
            step["kv_blocks_used"],
            step["kv_tokens_held"],
        )
        for at in range(int(start / width), min(int(end / width) + 1, SLICES)):
            share = (min(end, (at + 1) * width) - max(start, at * width)) / width
            if share > 0:
                for index, value in enumerate(values):
                    totals[at][index] += share * value
    return [Slice(*values) for values in totals]


def _area(values: Sequence[float], most: float) -> str:
    """A filled step curve, its points only where the height changes."""
    if not values:
        return ""
    heights = [round(100 - 100 * value / most, 1) for value in values]
    path, last = ["M0,100"], None
    for at, height in enumerate(heights):
        if height != last:
            path.append(f"H{at}V{height:g}")
            last = height
    return "".join([*path, f"H{len(heights)}V100z"])


def _tips(slices: Sequence[Slice], span: float, block_size: int | None) -> list[tuple[float, float, str]]:
    each, found = SLICES // TIPS, []
    for index in range(TIPS):
        here = slices[index * each : (index + 1) * each]
        means = [sum(getattr(s, name) for s in here) / each for name in _COLUMNS]
        start, end = span * index / TIPS, span * (index + 1) / TIPS
        said = f"{start:.3g} to {end:.3g} s: {means[0]:.1f} rows working"
        said += f", {means[1]:.1f} finished and still computed" if means[1] >= 0.05 else ""
        said += f", {means[2]:.1f} waiting, {number(means[3])} KV blocks"
        said += f" ({means[4] / (means[3] * block_size):.0%} of them filled)" if block_size and means[3] else ""
        found.append((100 * index / TIPS, 100 / TIPS, said))
    return found
