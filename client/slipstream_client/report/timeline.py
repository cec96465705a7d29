"""The request timeline of a comparison: when each request waited and when it was served, one strip per run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from slipstream_client.report.series import Run, records_of

SHOWN = 48  # requests of each run
WIDTH = 1000  # of the drawing; the page stretches it
FAILED_WIDTH = 4  # so that a request that failed at once can be seen

# Answers that a client sees within this time left in one batch; shorter batches are drawn off by at most as much.
SAME_BATCH_S = 0.1


@dataclass(frozen=True)
class Bar:
    """A piece of one request's life: waiting, served, held (finished, until its batch is done) or failed."""

    kind: str
    row: int
    start: float  # 0..WIDTH
    width: float


@dataclass(frozen=True)
class Strip:
    """The requests of one run, one row each in the order in which they were sent."""

    rows: int
    bars: list[Bar]

    def shows(self, kind: str) -> bool:
        return any(bar.kind == kind for bar in self.bars)


@dataclass(frozen=True)
class Timeline:
    """Strips on one time axis that starts with each run."""

    span: float  # seconds from the start of a run to the end of the axis
    strips: list[Strip]  # one a run, with no rows where there are no records of it

    def shows(self, kind: str) -> bool:
        return any(strip.shows(kind) for strip in self.strips)

    @property
    def rows(self) -> int:
        return max((strip.rows for strip in self.strips), default=0)


def timeline(runs: Sequence[Run], requests: Sequence[dict]) -> Timeline:
    """The first `SHOWN` requests of each run."""
    shown = [records_of(run, requests)[:SHOWN] for run in runs]
    span = max((record["last"] or record["sent"] for records in shown for record in records), default=0.0)
    scale = WIDTH / span if span > 0 else 0.0
    return Timeline(span, [_strip(records, scale) for records in shown])


def _strip(records: list[dict], scale: float) -> Strip:
    starts = _batch_starts(records)
    bars: list[Bar] = []
    for row, record in enumerate(records):
        sent, last = record["sent"], record["last"]
        if record["error"]:
            width = max(((last or sent) - sent) * scale, FAILED_WIDTH)
            bars.append(Bar("failed", row, min(sent * scale, WIDTH - FAILED_WIDTH), width))
            continue
        begun, done = _service(record, starts.get(record["id"]))
        times = {"waiting": (sent, begun), "served": (begun, done), "held": (done, last)}
        bars += [Bar(kind, row, start * scale, (end - start) * scale) for kind, (start, end) in times.items()]
    return Strip(len(records), [bar for bar in bars if bar.width > 0.05])


def _service(record: dict, batch_start: float | None) -> tuple[float, float]:
    """From when to when the engine worked on a request, in seconds from the run's start.

    Only the length of this time is known, as end-to-end latency less `queue_ms`. A stream ends with its last token, so
    the rest came before it. An answer in one piece may have been held for its batch: see `_batch_starts`.
    """
    sent, last = record["sent"], record["last"]
    worked = last - sent - (record["queue_ms"] or 0.0) / 1000
    if batch_start is None:
        return last - worked, last
    queued_at_door = ((record.get("stats") or {}).get("queue_ms") or 0.0) / 1000
    begun = min(max(sent + queued_at_door, batch_start), last - worked)
    return begun, begun + worked


def _batch_starts(records: list[dict]) -> dict[str, float]:
    """When the batch of each answer that was not streamed began: its longest member had nobody to wait for."""
    whole = [record for record in records if not record["error"] and record["first"] is None]
    whole.sort(key=lambda record: record["last"])
    starts: dict[str, float] = {}
    batch: list[dict] = whole[:1]
    for before, after in [*pairwise(whole), (None, None)]:
        if before and after and after["last"] - before["last"] < SAME_BATCH_S:
            batch.append(after)
            continue
        start = min((r["sent"] + (r["queue_ms"] or 0.0) / 1000 for r in batch), default=0.0)
        starts |= {record["id"]: start for record in batch}
        batch = [after] if after else []
    return starts


def ticks(span: float) -> list[tuple[str, float]]:
    """Round times for an axis of `span` seconds, at most six steps, with their places in per cent of its width."""
    if span <= 0:
        return []
    rough = span / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [(f"{index * step:g} s", index * step / span * 100) for index in range(int(span / step + 1e-9) + 1)]
