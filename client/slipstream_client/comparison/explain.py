"""Where a batcher's work and its requests' time went, from the engine's step records and the answers' own stats.

Three accounts of one run, each of parts that add up to a whole that was measured by other means; what they leave over
is stated as unexplained:

* slots: every row put through the model, by what it was for; the whole is the engine's counter of computed rows.
* engine time: the measured window, by what the engine did in it.
* request time: an average request from its intended time to its last response, by what it waited for.

Step records are in the run's clock, as the records of requests are; `clock_offset_s` is the server's clock less that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from slipstream_client.load.records import RequestRecord

Step = Mapping[str, Any]  # one line of steps.jsonl

# Kind of row: the field of a step record that counts it.
SLOTS = {
    "useful_decode": "decode_rows",
    "useful_prefill": "prefill_rows",
    "prompt_padding": "prompt_padding_rows",
    "finished_rows": "finished_rows",
    "recomputed": "recomputed_rows",
}
USEFUL_SLOTS = ("useful_decode", "useful_prefill")
ENGINE_TIMES = ("useful", "wasted", "scheduling", "bookkeeping", "messages", "idle")
# In the order in which they follow one another.
REQUEST_TIMES = (
    "client",
    "triton_queue",
    "wait_batch",
    "wait_step",
    "wait_seats",
    "wait_blocks",
    "wait_budget",
    "wait_priority",
    "prefill",
    "decode",
    "held",
    "delivery",
)


def explain_slots(steps: Sequence[Step], computed: int | None) -> dict[str, int] | None:
    """Rows by what they were for; None without records. `computed` is the engine's own count of all of them."""
    if not steps:
        return None
    rows = {kind: sum(step[field] for step in steps) for kind, field in SLOTS.items()}
    known = sum(rows.values())
    total = known if computed is None else computed
    return rows | {"unexplained": total - known, "total": total}


def explain_engine_time(steps: Sequence[Step], start_s: float, end_s: float) -> dict[str, float] | None:
    """Seconds of the engine in the window from `start_s` to `end_s`; None without records.

    A step's computing is useful and wasted in the proportion of its rows. `scheduling` is choosing what to compute,
    `bookkeeping` taking in the result; `messages` the time between two steps while there are requests in the engine:
    reading and answering its doors, and, under a batcher of Triton's that decides about each step, waiting for it;
    `idle` the time in which the engine had no request.
    """
    inside = [step for step in steps if start_s <= step["start_s"] < end_s]
    if not inside:
        return None
    seconds = dict.fromkeys(ENGINE_TIMES, 0.0)
    for step in inside:
        rows = {kind: step[field] for kind, field in SLOTS.items()}
        total = sum(rows.values())
        share = sum(rows[kind] for kind in USEFUL_SLOTS) / total if total else 0.0
        seconds["useful"] += step["run_s"] * share
        seconds["wasted"] += step["run_s"] * (1 - share)
        seconds["scheduling"] += step["schedule_s"]
        seconds["bookkeeping"] += step["update_s"]
    for step, after in pairwise(inside):
        seconds["messages" if step["left"] else "idle"] += max(after["start_s"] - _end_s(step), 0.0)
    seconds["idle"] += inside[0]["start_s"] - start_s + max(end_s - _end_s(inside[-1]), 0.0)
    whole = end_s - start_s
    return seconds | {"unexplained": whole - sum(seconds.values()), "total": whole}


def explain_request_time(
    records: Sequence[RequestRecord], steps: Sequence[Step], clock_offset_s: float | None, *, lock_step: bool
) -> dict[str, float] | None:
    """Mean milliseconds of the successful requests, by part; None where no request tells of its times.

    `lock_step`: the model runs whole batches, so that what waits in front of its engine waits for the next one.
    """
    if clock_offset_s is None:
        return None
    starts = [step["start_s"] for step in steps]
    explained = [
        parts
        for record in records
        if (parts := request_times_ms(record, starts, clock_offset_s, lock_step=lock_step)) is not None
    ]
    if not explained:
        return None
    return {part: sum(times[part] for times in explained) / len(explained) for part in explained[0]}


def request_times_ms(
    record: RequestRecord, step_starts: Sequence[float], clock_offset_s: float, *, lock_step: bool
) -> dict[str, float] | None:
    """One request's milliseconds by part, with `unexplained` and `total`; None where it failed or tells nothing.

    Where the two clocks disagree by more than a part took, that part is 0 and the difference unexplained.
    """
    stats = record.stats or {}
    if record.error is not None or record.sent is None or record.last is None or "arrival_s" not in stats:
        return None
    arrival = stats["arrival_s"] - clock_offset_s
    begun = arrival + stats["queue_ms"] / 1000
    first = arrival + (stats["first_token_ms"] or 0.0) / 1000
    ended = begun + stats["inference_ms"] / 1000
    released = ended + stats.get("held_ms", 0.0) / 1000
    spans = {
        "client": record.sent - record.intended,
        "triton_queue": arrival - record.sent,
        **_waits(arrival, begun, step_starts, stats.get("waited_for") or {}, lock_step=lock_step),
        "prefill": first - begun,
        "decode": ended - first,
        "held": released - ended,
        "delivery": record.last - released,
    }
    times = {part: max(spans.get(part, 0.0), 0.0) * 1000 for part in REQUEST_TIMES}
    total = (record.last - record.intended) * 1000
    return times | {"unexplained": total - sum(times.values()), "total": total}


def _waits(
    arrival: float, begun: float, step_starts: Sequence[float], waited_for: Mapping[str, int], *, lock_step: bool
) -> dict[str, float]:
    """Seconds between a request's arrival at its engine and its first step, by what it waited for.

    First for the end of the step that was running. What then remains is divided by the numbers of steps in which the
    request lacked a seat, blocks, budget or priority.
    """
    waited = begun - arrival
    if lock_step:
        return {"wait_batch": waited}
    counts = {kind: count for kind, count in waited_for.items() if count}
    if not counts:
        return {"wait_step": waited}
    at = bisect_left(step_starts, arrival)
    next_step = step_starts[at] if at < len(step_starts) else begun
    for_step = min(max(next_step - arrival, 0.0), waited)
    number = sum(counts.values())
    lacking = {f"wait_{kind}": (waited - for_step) * count / number for kind, count in counts.items()}
    return {"wait_step": for_step} | lacking


def _end_s(step: Step) -> float:
    return step["start_s"] + step["schedule_s"] + step["run_s"] + step["update_s"]
