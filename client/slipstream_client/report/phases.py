"""The life of one request on the clock of its run: at the client, waiting, prompt, answer, held for its batch."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream_client.report.study import Record, Run

WORDS = {
    "client": "at the client",
    "waiting": "waiting",
    "prefill": "reading the prompt",
    "decode": "writing the answer",
    "held": "held for the batch's longest answer",
    "first": "waiting and reading the prompt",
    "failed": "failed",
}


@dataclass(frozen=True)
class Phase:
    """One piece, in seconds from the start of the run."""

    kind: str  # a key of `WORDS`
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def tpot_s(record: Record) -> float | None:
    """Seconds for each output token after the first, as in `request_figures.tpot_ms`; None where that is undefined."""
    if record["first"] is None or record["output_tokens"] < 2:
        return None
    end = max((at for at, tokens in record["chunks"] if tokens), default=record["first"])
    return (end - record["first"]) / (record["output_tokens"] - 1)


def phases(record: Record, run: Run) -> list[Phase]:
    """The pieces in order, without gaps, from the intended start to the last response.

    The server's own times place them, on its clock where the offset is known; else they are laid back from the end,
    for an answer ends with its last token. A server that tells no times leaves only what a stream shows.
    """
    intended, sent = record["intended"], record["sent"]
    last = record["last"] if record["last"] is not None else sent
    if record["error"]:
        return [*_pieces([("client", intended, sent)]), Phase("failed", sent, last)]
    stats = record.get("stats") or {}
    inference_ms = stats.get("inference_ms")
    if inference_ms is None:
        if record["first"] is None:
            return _pieces([("client", intended, sent), ("first", sent, last)])
        first = record["first"]
        return _pieces([("client", intended, sent), ("first", sent, first), ("decode", first, last)])
    begun, read, done = _service(record, run, last)
    bounds = [intended, sent, begun, read, done, last]
    for at in range(1, len(bounds)):
        bounds[at] = min(max(bounds[at], bounds[at - 1]), last)
    kinds = ("client", "waiting", "prefill", "decode", "held" if record["first"] is None else "decode")
    return _pieces([(kind, bounds[at], bounds[at + 1]) for at, kind in enumerate(kinds)])


def _service(record: Record, run: Run, last: float) -> tuple[float, float, float]:
    """First step, first token, own last token."""
    stats = record["stats"]
    queue, inference = (stats.get("queue_ms") or 0.0) / 1000, stats["inference_ms"] / 1000
    offset, arrival = run.get("clock_offset_s"), stats.get("arrival_s")
    if offset is not None and arrival is not None:
        begun = arrival - offset + queue
    else:
        begun = last - (stats.get("held_ms") or 0.0) / 1000 - inference
    first_token = stats.get("first_token_ms")
    read = begun if first_token is None else begun + first_token / 1000 - queue
    return begun, read, begun + inference


def _pieces(pieces: list[tuple[str, float, float]]) -> list[Phase]:
    """Those that last, neighbours of one kind joined."""
    found: list[Phase] = []
    for kind, start, end in pieces:
        if end <= start:
            continue
        if found and found[-1].kind == kind:
            found[-1] = Phase(kind, found[-1].start, end)
        else:
            found.append(Phase(kind, start, end))
    return found
