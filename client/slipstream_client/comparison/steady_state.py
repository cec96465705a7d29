"""When tokens came, and the throughput while the server was fully loaded, without the run's beginning and end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream_client.comparison.request_figures import carrying, succeeded
from slipstream_client.load.records import RequestRecord

FULL = 0.9  # of the most requests in flight at once
LONGEST_DIP = 0.01  # of the window


def steady_state(records: Sequence[RequestRecord]) -> dict[str, Any] | None:
    """Output tokens/s in the longest span with at least 0.9 of the peak of requests in flight, or None for no span.

    The rule is that of SGLang's bench_serving, with one addition: a dip shorter than a hundredth of the window does not
    end the span, or in a closed loop every lock-step batch would. The span lies inside the window of the measured
    requests; in it requests of every phase count, since the server worked on all of them.
    """
    flights = [(record.sent, record.last) for record in records if record.sent is not None and record.last is not None]
    inside = [
        (record.sent, record.last)
        for record in records
        if record.phase == "measured" and record.sent is not None and record.last is not None
    ]
    if not inside:
        return None
    begin, end = min(sent for sent, _ in inside), max(last for _, last in inside)
    peak, spans = _full_spans(flights, begin, end)
    start, stop = max(spans, key=lambda span: span[1] - span[0], default=(begin, begin))
    if stop <= start:
        return None
    tokens = token_counts([record for record in records if succeeded(record)], np.array([start, stop]))
    return {"output_tokens_per_s": float(tokens[0] / (stop - start)), "from_s": start, "to_s": stop, "in_flight": peak}


def token_counts(records: Sequence[RequestRecord], edges: np.ndarray) -> np.ndarray:
    """Output tokens of `records` between one edge [n + 1] and the next, [n].

    A token counts when its chunk came. Where an answer came all at once, its tokens are spread evenly from the sending
    to the answer, or a batch would seem to be idle until it ends.
    """
    streamed = [chunk for record in records if record.first is not None for chunk in carrying(record)]
    times, tokens = np.array(streamed, dtype=float).reshape(-1, 2).T
    counts = np.histogram(times, edges, weights=tokens)[0].astype(float)
    whole = [
        (record.sent, record.last, record.output_tokens)
        for record in records
        if record.first is None and record.sent is not None and record.last is not None and record.last > record.sent
    ]
    sent, last, amount = np.array(whole, dtype=float).reshape(-1, 3).T[:, :, None]  # each [requests, 1]
    overlap = np.minimum(last, edges[1:]) - np.maximum(sent, edges[:-1])  # [requests, n]
    return counts + (amount * np.clip(overlap, 0, None) / (last - sent)).sum(axis=0)


def _full_spans(
    flights: Sequence[tuple[float, float]], begin: float, end: float
) -> tuple[int, list[tuple[float, float]]]:
    """The most requests in flight at once between two times, and the spans with at least `FULL` of that many."""
    events = sorted([(sent, 1) for sent, _ in flights] + [(last, -1) for _, last in flights])
    levels: list[tuple[float, float, int]] = []  # from, to, requests in flight
    in_flight = 0
    for (at, change), (until, _) in zip(events, [*events[1:], (end, 0)], strict=True):
        in_flight += change
        start, stop = max(at, begin), min(until, end)
        if stop > start:
            levels.append((start, stop, in_flight))
    peak = max((level for _, _, level in levels), default=0)
    spans: list[tuple[float, float]] = []
    for start, stop, level in levels:
        if level < FULL * peak:
            continue
        if spans and start - spans[-1][1] < LONGEST_DIP * (end - begin):
            spans[-1] = (spans[-1][0], stop)
        else:
            spans.append((start, stop))
    return peak, spans
