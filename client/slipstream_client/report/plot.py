"""Line charts as inline SVG that takes its colours from the page, so that one drawing serves light and dark.

Text in the drawing is limited to ticks and labels. What the pointer shows lies over it as elements of the page,
placed in per cent: they need no script, and their text keeps its size on a narrow screen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

from slipstream_client.report.labels import Room, spread

WIDTH, HEIGHT = 420, 270
LEFT, RIGHT, TOP, BOTTOM = 46, 104, 14, 42
LABEL_LIMIT = 15  # characters
LABEL_GAP = 15
NAME_SIZE, LOAD_SIZE = 12.5, 11.0  # as in the style sheet
NEAR = 20  # units from the right: a line that ends there is named beside the plot
APART = 16  # units within which the label of one mark speaks for the other
MARKER = 4.2
TOUCHING = 10  # units within which two marks are one place for the pointer


@dataclass(frozen=True)
class Mark:
    """One measured point; `low` and `high` are the ends of its whisker, the x ones of a second across it."""

    x: float
    y: float
    tip: str
    low: float | None = None
    high: float | None = None
    x_low: float | None = None
    x_high: float | None = None
    hollow: bool = False  # not to be trusted: requests failed, or the point is invalid
    label: str = ""
    verdict: str = ""


@dataclass(frozen=True)
class Line:
    """One series; `style` is its index in the style sheet."""

    name: str
    style: int
    marks: Sequence[Mark]
    dashed: bool = False
    marker: str = "o"
    bare: bool = False  # a curve without markers; its marks are still there for the pointer


@dataclass(frozen=True)
class Rule:
    """A line across, such as a target; at a value of y, or of x where `upright`."""

    at: float
    label: str
    style: int | None = None
    upright: bool = False
    tip: str = ""


@dataclass(frozen=True)
class Hover:
    """Where the pointer shows `tip`, in per cent of the drawing."""

    left: float
    top: float
    tip: str


@dataclass(frozen=True)
class Panel:
    """One chart."""

    title: str
    subtitle: str
    lines: Sequence[Line]
    x_title: str = ""
    x_ticks: Sequence[float] | None = None  # None: round numbers
    x_labels: Sequence[str] | None = None  # of `x_ticks`, where they are not their own
    log_x: bool = False
    log_y: bool = False
    rules: Sequence[Rule] = ()
    band: tuple[float, float] | None = None  # a shaded range of y
    top: float | None = None  # the end of the y axis
    note: str = ""
    key: str = ""

    @property
    def empty(self) -> bool:
        return not any(line.marks for line in self.lines)

    def draw(self) -> tuple[Markup, list[Hover]]:
        """The SVG element and what lies over it."""
        return _Drawing(self).finish()


@dataclass
class _Axis:
    """From values to places."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        if self.log:
            value, low, high = (math.log(max(v, 1e-9)) for v in (value, self.low, self.high))
        else:
            low, high = self.low, self.high
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + (self.end - self.start) * share


def round_ticks(high: float, steps: int = 5, low: float = 0.0) -> list[float]:
    """Round numbers from `low` to `high`, at most `steps` steps."""
    if high <= low:
        return [low]
    rough = (high - low) / steps
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(axis: _Axis) -> list[float]:
    """Powers of ten on a logarithmic axis, with 2 and 5 times them where it is short."""
    low, high = math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high))
    factors = (1, 2, 5) if math.log10(axis.high / axis.low) <= 2.3 else (1,)
    ticks = [factor * 10.0**power for power in range(low, high + 1) for factor in factors]
    return [tick for tick in ticks if axis.low * 0.999 <= tick <= axis.high * 1.001]


@dataclass
class _Drawing:
    panel: Panel
    parts: list[str] = field(default_factory=list)
    hovers: list[Hover] = field(default_factory=list)
    room: Room = field(default_factory=lambda: Room(LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM))
    labelled: list[tuple[float, float]] = field(default_factory=list)  # places of marks that have a label

    def __post_init__(self) -> None:
        panel = self.panel
        marks = [mark for line in panel.lines for mark in line.marks]
        xs = [x for m in marks for x in (m.x, m.x_low, m.x_high) if x is not None] + list(panel.x_ticks or ())
        ys = [y for m in marks for y in (m.y, m.low, m.high) if y is not None]
        ys += [rule.at for rule in panel.rules if not rule.upright]
        top = panel.top or max(ys, default=1.0) * 1.06 or 1.0
        single = panel.x_ticks is not None and len(set(panel.x_ticks)) == 1
        log = panel.log_x and min(xs, default=0) > 0
        low_x = min(xs, default=0.0) if log or panel.x_ticks else 0.0
        high_x = max(xs, default=1.0) * (1 if log or panel.x_ticks else 1.04)
        self.x = _Axis(low_x, low_x if single else high_x, LEFT + 10, WIDTH - RIGHT - 8, log)
        bottom = min(ys, default=0.0)
        log_y = panel.log_y and bottom > 0
        self.y = _Axis(bottom / 1.25 if log_y else 0.0, top * (1.1 if log_y else 1), HEIGHT - BOTTOM, TOP, log_y)

    def finish(self) -> tuple[Markup, list[Hover]]:
        self._frame()
        for rule in self.panel.rules:
            self._rule(rule)
        for line in self.panel.lines:
            self._line(line)
        self._names()
        self._loads()
        label = escape(f"{self.panel.title}. {self.panel.subtitle}")
        head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        return Markup(head + "".join(self.parts) + "</svg>"), self.hovers  # every name in it is escaped

    def _text(self, x: float, y: float, text: str, kind: str, anchor: str = "middle") -> None:
        self.parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def _hover(self, x: float, y: float, tip: str) -> None:
        """Marks that lie on one another share their place, so that the pointer reaches all."""
        left, top = 100 * x / WIDTH, 100 * y / HEIGHT
        for at, other in enumerate(self.hovers):
            if abs(other.left - left) * WIDTH < 100 * TOUCHING and abs(other.top - top) * HEIGHT < 100 * TOUCHING:
                self.hovers[at] = Hover(other.left, other.top, f"{other.tip}\n{tip}")
                return
        self.hovers.append(Hover(left, top, tip))

    def _frame(self) -> None:
        panel, right, bottom = self.panel, WIDTH - RIGHT, HEIGHT - BOTTOM
        if panel.band:
            high, low = self.y.place(panel.band[1]), self.y.place(panel.band[0])
            self.parts.append(
                f'<rect class="band" x="{LEFT}" y="{high:.1f}" width="{right - LEFT}" height="{low - high:.1f}"/>'
            )
        for tick in _log_ticks(self.y) if self.y.log else round_ticks(self.y.high, 4):
            y = self.y.place(tick)
            self.parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            self._text(LEFT - 7, y + 4, f"{tick:,.10g}", "tick", "end")
        ticks = list(panel.x_ticks) if panel.x_ticks is not None else self._x_ticks()
        labels = panel.x_labels or [f"{tick:,.10g}" for tick in ticks]
        for tick, label in zip(ticks, labels, strict=True):
            x = self.x.place(tick)
            self.parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
            self._text(x, bottom + 17, label, "tick")
        self._text((LEFT + right) / 2, HEIGHT - 6, panel.x_title, "tick")

    def _x_ticks(self) -> list[float]:
        return _log_ticks(self.x) if self.x.log else round_ticks(self.x.high, 5)

    def _rule(self, rule: Rule) -> None:
        kind = "rule" if rule.style is None else f"rule s{rule.style}"
        if rule.upright:
            x = self.x.place(rule.at)
            bottom = HEIGHT - BOTTOM
            self.parts.append(f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
            self.room.strokes.append((x, TOP, x, bottom))
            knee = "knee" if rule.style is None else f"knee s{rule.style}"
            self.parts.append(f'<path class="{knee}" d="M{x - 5:.1f},{TOP - 8}h10l-5,8z"/>')
            self._hover(x, TOP - 4, rule.tip or rule.label)
            return
        y = self.y.place(rule.at)
        self.parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        self.room.strokes.append((LEFT, y, WIDTH - RIGHT, y))

    def _line(self, line: Line) -> None:
        points = [(self.x.place(mark.x), self.y.place(mark.y), mark) for mark in line.marks]
        path = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        dashes = ' stroke-dasharray="6 4"' if line.dashed else ""
        if len(points) > 1:
            self.parts.append(f'<path class="line s{line.style}" d="{path}"{dashes}/>')
            self.room.strokes += [(x, y, *after[:2]) for (x, y, _), after in itertools.pairwise(points)]
        for x, y, mark in points:
            if mark.low is not None and mark.high is not None and mark.high > mark.low:
                low, high = self.y.place(mark.low), self.y.place(mark.high)
                self.parts.append(f'<path class="whisker s{line.style}" d="M{x:.1f},{low:.1f}V{high:.1f}"/>')
                self.room.strokes.append((x, low, x, high))
            if mark.x_low is not None and mark.x_high is not None and mark.x_high > mark.x_low:
                low, high = self.x.place(mark.x_low), self.x.place(mark.x_high)
                self.parts.append(f'<path class="whisker s{line.style}" d="M{low:.1f},{y:.1f}H{high:.1f}"/>')
                self.room.strokes.append((low, y, high, y))
            if not line.bare:
                hollow = " hollow" if mark.hollow else ""
                self.parts.append(f'<path class="marker s{line.style}{hollow}" d="{_marker(line.marker, x, y)}"/>')
                reach = 1.25 * MARKER  # of the widest; less high than a label, which crosses its upper or its lower end
                self.room.strokes += [(x - reach, end, x + reach, end) for end in (y - reach, y + reach)]
            if mark.tip:
                self._hover(x, y, mark.tip)

    def _names(self) -> None:
        """Of lines that end in the plot, at their ends where there is room; all others, and of targets, beside it."""
        beside = [
            (self.y.place(rule.at), rule.label, "tick") for rule in self.panel.rules if rule.label and not rule.upright
        ]
        for line in self.panel.lines:
            if not line.marks:
                continue
            name = line.name if len(line.name) <= LABEL_LIMIT else f"{line.name[: LABEL_LIMIT - 1]}…"
            x, y = self.x.place(line.marks[-1].x), self.y.place(line.marks[-1].y)
            label = self.room.place(name, x, y, NAME_SIZE) if x < self.x.end - NEAR else None
            if label:
                self._text(label.x, label.y, name, f"name s{line.style}", label.anchor)
            else:
                beside.append((y, name, f"name s{line.style}"))
        beside.sort()
        places = spread([y for y, _, _ in beside], LABEL_GAP, TOP + 4, HEIGHT - BOTTOM)
        for (_, text, kind), y in zip(beside, places, strict=True):
            self._text(WIDTH - RIGHT + 6, y + 4, text, kind, "start")

    def _loads(self) -> None:
        """The labels of marks, each where there is room and no other near by."""
        for mark in (mark for line in self.panel.lines for mark in line.marks if mark.label):
            x, y = self.x.place(mark.x), self.y.place(mark.y)
            if any(abs(x - its_x) < APART and abs(y - its_y) < APART for its_x, its_y in self.labelled):
                continue
            if label := self.room.place(mark.label, x, y, LOAD_SIZE):
                self.labelled.append((x, y))
                self._text(label.x, label.y, mark.label, "tick at", label.anchor)


def _marker(kind: str, x: float, y: float, size: float = MARKER) -> str:
    """The outline of a marker, by matplotlib's letters, so that charts and page look alike."""
    if kind == "o":
        return f"M{x - size:.1f},{y:.1f}a{size},{size} 0 1 0 {2 * size},0a{size},{size} 0 1 0 {-2 * size},0z"
    corners = {
        "s": ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
        "D": ((0, -1.25), (1.25, 0), (0, 1.25), (-1.25, 0)),
        "^": ((0, -1.2), (1.15, 0.9), (-1.15, 0.9)),
        "v": ((0, 1.2), (1.15, -0.9), (-1.15, -0.9)),
        "<": ((-1.2, 0), (0.9, -1.15), (0.9, 1.15)),
        ">": ((1.2, 0), (-0.9, -1.15), (-0.9, 1.15)),
        "p": ((0, -1.2), (1.15, -0.3), (0.7, 1.1), (-0.7, 1.1), (-1.15, -0.3)),
        "P": (
            *((-0.4, -1.2), (0.4, -1.2), (0.4, -0.4), (1.2, -0.4), (1.2, 0.4), (0.4, 0.4)),
            *((0.4, 1.2), (-0.4, 1.2), (-0.4, 0.4), (-1.2, 0.4), (-1.2, -0.4), (-0.4, -0.4)),
        ),
        "X": (
            *((-1.2, -0.7), (-0.7, -1.2), (0, -0.5), (0.7, -1.2), (1.2, -0.7), (0.5, 0)),
            *((1.2, 0.7), (0.7, 1.2), (0, 0.5), (-0.7, 1.2), (-1.2, 0.7), (-0.5, 0)),
        ),
    }[kind]
    return "M" + "L".join(f"{x + size * dx:.1f},{y + size * dy:.1f}" for dx, dy in corners) + "z"
