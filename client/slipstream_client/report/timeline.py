"""The request timeline of a comparison: when each request waited and when it was served, one strip a variant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream_client.report.formats import duration
from slipstream_client.report.phases import WORDS, phases
from slipstream_client.report.plot import round_ticks
from slipstream_client.report.study import Cell, Record, Run, Study

SHOWN = 48  # requests of each strip
FAILED_WIDTH = 0.4  # per cent, so that a request that failed at once can be seen
HAIR = 0.03  # per cent; less is not drawn
# A request that finished first in its batch is told by its hold; what is shorter is the way back to the client.
HELD_AT_LEAST_S = 0.005


@dataclass(frozen=True)
class Bar:
    """A piece of one request's life, in per cent of the axis."""

    kind: str
    start: float
    width: float


@dataclass(frozen=True)
class Row:
    """One request."""

    bars: Sequence[Bar]
    tip: str


@dataclass(frozen=True)
class Strip:
    """The requests of one run, in the order in which they were sent."""

    cell: Cell
    rows: Sequence[Row]


@dataclass(frozen=True)
class Timeline:
    """Strips on one time axis that starts with each run."""

    span: float  # seconds from the start of a run to the end of the axis
    strips: Sequence[Strip]  # one a variant that has records

    @property
    def kinds(self) -> list[str]:
        """Those that are drawn, in the order of a life."""
        drawn = {bar.kind for strip in self.strips for row in strip.rows for bar in row.bars}
        return [kind for kind in WORDS if kind in drawn]

    @property
    def rows(self) -> int:
        return max((len(strip.rows) for strip in self.strips), default=0)


def timeline(study: Study, cells: Sequence[Cell]) -> Timeline:
    """The first `SHOWN` requests of the first repeat of each cell, warm-up included."""
    shown = [(cell, cell.runs[0], study.records(cell.runs[0])[:SHOWN]) for cell in cells]
    shown = [(cell, run, records) for cell, run, records in shown if records]
    ends = [record["last"] if record["last"] is not None else record["sent"] for _, _, rows in shown for record in rows]
    span = max(ends, default=0.0)
    scale = 100 / span if span > 0 else 0.0
    return Timeline(span, [Strip(cell, [_row(record, run, scale) for record in rows]) for cell, run, rows in shown])


def _row(record: Record, run: Run, scale: float) -> Row:
    bars, told = [], []
    for phase in phases(record, run):
        if phase.kind == "held" and phase.seconds < HELD_AT_LEAST_S:
            continue
        width = phase.seconds * scale
        if phase.kind == "failed":
            width = max(width, FAILED_WIDTH)
        if width >= HAIR:
            bars.append(Bar(phase.kind, min(phase.start * scale, 100 - width), width))
            told.append(f"{WORDS[phase.kind]} {duration(phase.seconds * 1000)}")
    said = record["error"] or f"{record['input_tokens']} tokens in, {record['output_tokens']} out"
    marked = "" if record["phase"] == "measured" else f" ({record['phase'].replace('_', '-')}, not counted)"
    return Row(bars, f"request {record['index']}{marked}: {said}; {', '.join(told)}")


def ticks(span: float) -> list[tuple[str, float]]:
    """Round times for an axis of `span` seconds, with their places in per cent of its width."""
    return [(f"{at:g} s", 100 * at / span) for at in round_ticks(span, 6)] if span > 0 else []
