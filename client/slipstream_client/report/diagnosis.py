"""What holds each variant back, in words: a small set of rules, each stating the figures that it used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from slipstream_client.report.batching import mean_batch
from slipstream_client.report.formats import duration, number, percent, short
from slipstream_client.report.study import Cell, Family, Study

LARGE = 0.2  # of an average request's time, or of all token-slots: worth a word
NOTABLE = 0.1
IDLE = 0.3  # of the engine's time
FLAT = 0.05  # growth of throughput that counts as none where no noise floor is known
SLOWER = 1.3  # growth of latency that tells a queue


@dataclass(frozen=True)
class Finding:
    """One diagnosis of one variant; `figures` are what it rests on."""

    variant: str
    words: str
    figures: str


def diagnose(study: Study, family: Family) -> list[Finding]:
    """The findings of every rule for every variant, at the highest load of a family."""
    found = []
    for cell in study.cells(family.workload, family.loads[-1]):
        if cell.succeeded:
            for rule in RULES:
                found += [Finding(cell.variant, *said) for said in rule(study, family, cell)]
    return found


Said = Iterator[tuple[str, str]]


def _too_few_seats(study: Study, family: Family, cell: Cell) -> Said:
    time, free = cell.parts("request_time_ms"), not cell.total("preemptions")
    if time and time["wait_seats"] >= NOTABLE * time["total"] and free and time["wait_blocks"] < 0.01 * time["total"]:
        yield (
            "Too few seats: requests wait for one while KV memory is free. More (max_num_seqs) would let them in.",
            f"waiting for a seat {_of(time, 'wait_seats')}, for KV memory {_of(time, 'wait_blocks')}, no preemption",
        )


def _too_little_memory(study: Study, family: Family, cell: Cell) -> Said:
    time, preemptions = cell.parts("request_time_ms"), cell.total("preemptions")
    if preemptions or (time and time["wait_blocks"] >= NOTABLE * time["total"]):
        waited = f", waiting for KV memory {_of(time, 'wait_blocks')}" if time else ""
        yield (
            "Too little KV memory: requests wait for blocks or are preempted. "
            "More of it (kv_cache_bytes) or fewer seats would help.",
            f"{number(preemptions)} preemptions{waited}, peak {number(_peak(cell))} blocks",
        )


def _saturated(study: Study, family: Family, cell: Cell) -> Said:
    loads = list(family.loads)
    before = next((c for load in reversed(loads[:-1]) if (c := study.cell(cell.workload, load, cell.variant))), None)
    if before is None or not before.succeeded:
        return
    rate, earlier = cell.metric("output_tokens_per_s"), before.metric("output_tokens_per_s")
    late, sooner = cell.metric("e2e_mean_ms"), before.metric("e2e_mean_ms")
    if not rate or not earlier or not late or not sooner:
        return
    floor = study.floor("output_tokens_per_s", len(cell.runs), len(before.runs))
    if rate / earlier <= 1 + (FLAT if floor is None else max(floor, FLAT)) and late / sooner >= SLOWER:
        yield (
            f"Saturated: from {before.load.words} to {cell.load.words} there is no more throughput, only waiting.",
            f"tokens/s {short(earlier)} to {short(rate)}, mean end-to-end {duration(sooner)} to {duration(late)}",
        )


def _lock_step(study: Study, family: Family, cell: Cell) -> Said:
    time, slots = cell.parts("request_time_ms"), cell.parts("slots")
    if time and time["held"] >= LARGE * time["total"]:
        wasted = f", {_of(slots, 'finished_rows', number)} token-slots on finished rows" if slots else ""
        yield (
            "Held by its longest answer: finished requests wait for the end of the batch, and none takes their place.",
            f"held {_of(time, 'held')}{wasted}",
        )


def _padding(study: Study, family: Family, cell: Cell) -> Said:
    slots = cell.parts("slots")
    if slots and slots["prompt_padding"] >= LARGE * slots["total"]:
        yield (
            "Prompts of unlike lengths: much of what is computed fills them up to the longest of their batch.",
            f"prompt padding {_of(slots, 'prompt_padding', number)} token-slots",
        )


def _recomputed(study: Study, family: Family, cell: Cell) -> Said:
    slots = cell.parts("slots")
    if slots and slots["recomputed"] >= NOTABLE * slots["total"]:
        yield (
            "Work is thrown away: preempted requests are computed again.",
            f"recomputed {_of(slots, 'recomputed', number)} token-slots",
        )


def _queue(study: Study, family: Family, cell: Cell) -> Said:
    time = cell.parts("request_time_ms")
    if time and time["triton_queue"] >= LARGE * time["total"]:
        batch = mean_batch(cell)
        size = f", {batch:.1f} requests an execution" if batch else ""
        yield (
            "Requests queue in Triton until the batch before theirs is done.",
            f"in Triton's queue {_of(time, 'triton_queue')}{size}",
        )


def _budget(study: Study, family: Family, cell: Cell) -> Said:
    time = cell.parts("request_time_ms")
    if time and time["wait_budget"] >= NOTABLE * time["total"]:
        yield (
            "The token budget of a step is short: prompts wait for room. A larger one trades token latency for this.",
            f"waiting for the budget {_of(time, 'wait_budget')}",
        )


def _client(study: Study, family: Family, cell: Cell) -> Said:
    time = cell.parts("request_time_ms")
    if time and time["client"] >= NOTABLE * time["total"]:
        yield (
            "The wait begins at the client: requests were sent later than they were due.",
            f"at the client {_of(time, 'client')}",
        )


def _idle(study: Study, family: Family, cell: Cell) -> Said:
    time = cell.parts("engine_time_s")
    if time and time["idle"] >= IDLE * time["total"]:
        yield (
            "Not loaded: the engine often had nothing to do, so its capacity lies higher than what is shown.",
            f"idle {_of(time, 'idle', _seconds)}",
        )


def _overhead(study: Study, family: Family, cell: Cell) -> Said:
    time = cell.parts("engine_time_s")
    if time and time["scheduling"] + time["bookkeeping"] + time["messages"] >= LARGE * time["total"]:
        parts = ", ".join(f"{name} {_of(time, name, _seconds)}" for name in ("scheduling", "bookkeeping", "messages"))
        yield "Much of the engine's time is not computation.", parts


RULES: tuple[Callable[[Study, Family, Cell], Said], ...] = (
    _saturated,
    _too_few_seats,
    _too_little_memory,
    _lock_step,
    _padding,
    _recomputed,
    _queue,
    _budget,
    _client,
    _idle,
    _overhead,
)


def _of(parts: dict[str, float], key: str, text: Callable[[float], str] = duration) -> str:
    """ "1.2 s (34%)"."""
    return f"{text(parts[key])} ({percent(parts[key] / parts['total'], 0)})"


def _seconds(value: float) -> str:
    return f"{short(value)} s"


def _peak(cell: Cell) -> float | None:
    return max((run["kv_peak_blocks"] for run in cell.runs if run.get("kv_peak_blocks")), default=None)
