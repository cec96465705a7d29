"""Where token-slots, requests' time and the engine's time went: the parts of the bars, and what they are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream_client.report.formats import duration, listed, number, percent, short, times, whole_percents
from slipstream_client.report.study import Cell, Study

UNEXPLAINED_LIMIT = 0.02  # a larger share means that the counters do not add up
MENTIONED = 0.1  # of the whole: a smaller difference is no reason


@dataclass(frozen=True)
class Part:
    """One colour of a bar: its name in the results, on the bar, in the legend, in a sentence; ink is for its label."""

    key: str
    label: str
    legend: str
    sentence: str
    fill: str
    ink: str = "#ffffff"
    useful: bool = False


# Muted, where those of the variants are strong, so that no part looks like a variant. Light and dark alternate along
# each bar, so that its parts also differ in grey.
SLATE, MIST, RUST, SAND, ROSE, STONE = "#46586F", "#9FB3CB", "#9C6648", "#E6D29C", "#BC857F", "#6F6A62"
PALE, OLIVE, CREAM, STRAW, LILAC, PLUM = "#DADDE2", "#858A50", "#F1EBD2", "#C2B48A", "#DCCCEA", "#75485C"
TEAL, SAGE = "#55797A", "#8FBDA5"
DARK = "#16181b"

SLOTS = (
    Part("useful_decode", "answer", "useful: tokens of answers (decode)", "tokens of answers", SLATE, useful=True),
    Part(
        "useful_prefill", "prompt", "useful: tokens of prompts (prefill)", "tokens of prompts", MIST, DARK, useful=True
    ),
    Part("prompt_padding", "padding", "prompts filled up to the longest of their batch", "prompt padding", SAND, DARK),
    Part(
        "finished_rows",
        "finished",
        "finished answers that the batch went on computing",
        "answers already finished",
        RUST,
    ),
    Part("recomputed", "again", "computed again after preemption", "recomputing after preemption", ROSE, DARK),
    Part("unexplained", "?", "unexplained", "rows not explained", STONE),
)
REQUEST_TIME = (
    Part("client", "client", "at the client, before it was sent", "at the client", PALE, DARK),
    Part("triton_queue", "Triton's queue", "in Triton's own queue", "in Triton's queue", OLIVE, DARK),
    Part("wait_batch", "batch", "waiting for the running batch to end", "waiting for the batch before it", CREAM, DARK),
    Part("wait_step", "step", "waiting for the running step to end", "waiting for the step before it", STRAW, DARK),
    Part("wait_seats", "seat", "waiting for a free seat", "waiting for a seat", LILAC, DARK),
    Part("wait_blocks", "memory", "waiting for KV cache memory", "waiting for KV memory", ROSE, DARK),
    Part("wait_budget", "budget", "waiting for room in a step (token budget)", "waiting for the token budget", PLUM),
    Part("wait_priority", "priority", "waiting behind higher priority", "waiting behind higher priority", TEAL),
    Part("prefill", "prompt", "reading the prompt (prefill)", "reading the prompt", MIST, DARK, useful=True),
    Part("decode", "answer", "writing the answer (decode)", "writing the answer", SLATE, useful=True),
    Part(
        "held", "held", "finished, but held for the batch's longest answer", "held for the batch's longest answer", RUST
    ),
    Part("delivery", "delivery", "delivery to the client", "in delivery", SAGE, DARK),
    Part("unexplained", "?", "unexplained", "not explained", STONE),
)
ENGINE_TIME = (
    Part("useful", "useful", "computing useful rows", "computing useful rows", SLATE, useful=True),
    Part("wasted", "wasted", "computing wasted rows", "computing wasted rows", RUST),
    Part("scheduling", "scheduling", "scheduling", "scheduling", LILAC, DARK),
    Part("bookkeeping", "bookkeeping", "taking in what was computed", "bookkeeping", SAGE, DARK),
    Part("messages", "messages", "messages to and from the doors", "messages", ROSE, DARK),
    Part("idle", "idle", "idle: nothing to do", "idle", PALE, DARK),
    Part("unexplained", "?", "unexplained", "not explained", STONE),
)


@dataclass(frozen=True)
class Segment:
    """A part of one bar."""

    part: Part
    value: float  # in the unit of the bars
    share: float  # of this bar
    width: float  # in per cent of the longest bar
    text: str  # the value as it stands on the segment
    tip: str

    @property
    def fits(self) -> str:
        """Where there is room for its value: "all" screens, only a "wide" one, or none ("")."""
        need = len(self.text)
        return "all" if self.width >= 2 + 2.2 * need else "wide" if self.width >= 1 + 0.8 * need else ""

    @property
    def word_fits(self) -> bool:
        """Whether a wide screen has room for its name as well."""
        return self.width >= 1 + 0.8 * (len(self.part.label) + 1 + len(self.text))


@dataclass(frozen=True)
class StackedBar:
    """One variant's bar."""

    cell: Cell
    total: float
    segments: Sequence[Segment]


@dataclass(frozen=True)
class Bars:
    """All bars of one picture, on one scale."""

    key: str
    bars: Sequence[StackedBar]
    parts: Sequence[Part]  # those that any bar has

    def text(self, value: float) -> str:
        """A value as it stands on a segment."""
        if self.key == "engine_time_s":
            return duration(value * 1000)
        return duration(value) if self.key == "request_time_ms" else f"{value:.2f}"


def slot_bars(cells: Sequence[Cell]) -> Bars:
    """Token-slots computed for each useful one."""
    rows = [(cell, parts) for cell in cells if (parts := cell.parts("slots"))]
    scaled = []
    for cell, parts in rows:
        useful = parts["useful_decode"] + parts["useful_prefill"]
        if useful:
            scaled.append((cell, {name: value / useful for name, value in parts.items()}, parts))
    return _bars("slots", SLOTS, scaled, lambda value: f"{number(value)} token-slots a run")


def request_time_bars(cells: Sequence[Cell]) -> Bars:
    """Milliseconds of an average request."""
    rows = [(cell, parts, parts) for cell in cells if (parts := cell.parts("request_time_ms"))]
    return _bars("request_time_ms", REQUEST_TIME, rows, duration)


def engine_time_bars(cells: Sequence[Cell]) -> Bars:
    """Seconds of the engine's time."""
    rows = [(cell, parts, parts) for cell in cells if (parts := cell.parts("engine_time_s")) and parts["total"]]
    return _bars("engine_time_s", ENGINE_TIME, rows, lambda value: f"{short(value)} s a run")


Row = tuple[
    Cell, dict[str, float], dict[str, float]
]  # its parts in the unit of the bars, and as they are in the results


def _bars(key: str, parts: Sequence[Part], rows: Sequence[Row], tip_of: Callable[[float], str]) -> Bars:
    empty = Bars(key, [], [])
    longest = max((values["total"] for _, values, _ in rows), default=0.0)
    bars = []
    for cell, values, raw in rows:
        total = values["total"]
        segments = []
        for part in parts:
            value = values.get(part.key, 0.0)
            if value > 0:
                share = value / total
                tip = f"{cell.variant}: {part.legend}: {percent(share)}, {tip_of(raw[part.key])}"
                segments.append(Segment(part, value, share, 100 * value / longest, empty.text(value), tip))
        bars.append(StackedBar(cell, total, segments))
    used = {segment.part.key for bar in bars for segment in bar.segments if segment.width >= 0.05}
    return Bars(key, bars, [part for part in parts if part.key in used])


def larger_steps(study: Study, cells: Sequence[Cell]) -> str:
    """Why the most wasteful lost less time than its rows suggest: only where each cost less, in larger steps."""
    costs = [(cell, *cost) for cell in cells if (cost := _cost_of_rows(study, cell))]
    if len(costs) < 2:
        return ""
    lean, wasteful = min(costs, key=lambda cost: cost[1]), max(costs, key=lambda cost: cost[1])
    (cell, rows, seconds, a_step), (other, more_rows, more_seconds, more_a_step) = lean, wasteful
    cheaper = (more_seconds / more_rows) / (seconds / rows)
    if more_rows / rows < 1 + MENTIONED or cheaper > 1 - MENTIONED or more_a_step <= a_step:
        return ""
    return (
        f"{other.variant} computed {times(more_rows / rows)} the token-slots of {cell.variant} in "
        f"{times(more_seconds / seconds)} the computing time: its steps are larger ({short(more_a_step)} rows on "
        f"average against {short(a_step)}), and in a larger step a row costs less."
    )


def _cost_of_rows(study: Study, cell: Cell) -> tuple[float, float, float] | None:
    """Token-slots and seconds of computing a run, and token-slots a step."""
    slots, spent = cell.parts("slots"), cell.parts("engine_time_s")
    steps = [len(known) for run in cell.runs if (known := study.steps(run))]
    seconds = spent["useful"] + spent["wasted"] if spent else 0.0
    if not slots or not slots["total"] or not seconds or len(steps) < len(cell.runs):
        return None
    return slots["total"], seconds, slots["total"] * len(steps) / sum(steps)


def unexplained(cells: Sequence[Cell]) -> list[str]:
    """Where the parts leave more than `UNEXPLAINED_LIMIT` of the whole open."""
    found = []
    for cell in cells:
        for key, words in (("slots", "token-slots"), ("request_time_ms", "an average request's time")):
            parts = cell.parts(key)
            if parts and parts["total"] and abs(parts["unexplained"]) > UNEXPLAINED_LIMIT * parts["total"]:
                share = percent(parts["unexplained"] / parts["total"])
                found.append(
                    f"{share} of {words} of {cell.variant} at {cell.load.words} ({cell.workload}) is unexplained"
                )
    return found


def slots_reason(cell: Cell, other: Cell) -> str | None:
    """Why one does more useful work in its time than the other: what the other's token-slots went to."""
    mine, theirs = cell.parts("slots"), other.parts("slots")
    if not mine or not theirs or not mine["total"] or not theirs["total"]:
        return None
    shares = {
        part: theirs[part.key] / theirs["total"] - mine[part.key] / mine["total"] for part in SLOTS if not part.useful
    }
    found = [part for part, more in sorted(shares.items(), key=lambda item: -item[1]) if more >= MENTIONED / 2][:2]
    if not found:
        return None

    def useful(parts: dict[str, float]) -> float:
        return (parts["useful_decode"] + parts["useful_prefill"]) / parts["total"]

    told = [theirs[part.key] / theirs["total"] for part in found]
    most = percent(useful(mine), 0)
    little, *wasted, _ = whole_percents([useful(theirs), *told, 1 - useful(theirs) - sum(told)])
    spent = listed([f"{share} went to {part.sentence}" for share, part in zip(wasted, found, strict=True)])
    return (
        f"{most} of what the model computed for {cell.variant} was useful, "
        f"but only {little} of what it computed for {other.variant}: {spent}"
    )


def time_reason(cell: Cell, other: Cell) -> str | None:
    """Why requests of the one are answered sooner: where those of the other spend more time."""
    mine, theirs = cell.parts("request_time_ms"), other.parts("request_time_ms")
    if not mine or not theirs:
        return None
    before = REQUEST_TIME[: [part.key for part in REQUEST_TIME].index("prefill") + 1]
    pieces = [("waiting and reading the prompt" + _mostly(theirs, before), before)]
    pieces += [(part.sentence, (part,)) for part in REQUEST_TIME if part not in before]
    spent = []
    for words, parts in pieces:
        more, less = (sum(each[part.key] for part in parts) for each in (theirs, mine))
        if more - less >= MENTIONED * theirs["total"]:
            against = duration(less) if less >= 0.5 else "none"
            spent.append((more - less, f"{duration(more)} {words} (against {against})"))
    if not spent:
        return None
    told = [words for _, words in sorted(spent, reverse=True)[:2]]
    return f"an average request of {other.variant} spends {listed(told)}"


def _mostly(times_ms: dict[str, float], parts: Sequence[Part]) -> str:
    """The part that more than half of some time went to, unless that is reading the prompt."""
    largest = max(parts, key=lambda part: times_ms[part.key])
    half = sum(times_ms[part.key] for part in parts) / 2
    return f", mostly {largest.sentence}" if largest.key != "prefill" and times_ms[largest.key] > half else ""
