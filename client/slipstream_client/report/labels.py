"""Where the labels of a chart stand: near what they name, and free of its strokes and of one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

WIDEST, ASCENT, DESCENT = 0.6, 0.93, 0.24  # of a character, in units of the text's size

Stroke = tuple[float, float, float, float]  # straight, from x, y to x, y


@dataclass(frozen=True)
class Label:
    """A text at its place, as SVG has it: `x` of its anchor, `y` of its base line."""

    text: str
    x: float
    y: float
    anchor: str  # start, middle or end
    size: float

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Left, top, right, bottom."""
        width = len(self.text) * self.size * WIDEST
        left = self.x - {"start": 0.0, "middle": 0.5, "end": 1.0}[self.anchor] * width
        return left, self.y - ASCENT * self.size, left + width, self.y + DESCENT * self.size

    def overlaps(self, other: Label) -> bool:
        (left, top, right, bottom), (its_left, its_top, its_right, its_bottom) = self.box, other.box
        return left < its_right and its_left < right and top < its_bottom and its_top < bottom

    def crossed_by(self, stroke: Stroke) -> bool:
        """Whether a part of the stroke lies in its box (Liang and Barsky 1984)."""
        left, top, right, bottom = self.box
        enters, leaves = 0.0, 1.0
        for start, end, low, high in ((stroke[0], stroke[2], left, right), (stroke[1], stroke[3], top, bottom)):
            if start == end:
                if not low < start < high:
                    return False
                continue
            first, last = sorted(((low - start) / (end - start), (high - start) / (end - start)))
            enters, leaves = max(enters, first), min(leaves, last)
        return enters < leaves


@dataclass
class Room:
    """What a plot already holds."""

    left: float
    top: float
    right: float
    bottom: float
    strokes: list[Stroke] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)

    def place(self, text: str, x: float, y: float, size: float) -> Label | None:
        """Put a label to a mark, at the first of eight places around it that is free; None where none is."""
        found = next(filter(self._free, _around(text, x, y, size)), None)
        if found:
            self.labels.append(found)
        return found

    def _free(self, label: Label) -> bool:
        left, top, right, bottom = label.box
        within = self.left <= left and self.top <= top and right <= self.right and bottom <= self.bottom
        return within and not any(map(label.overlaps, self.labels)) and not any(map(label.crossed_by, self.strokes))


def _around(text: str, x: float, y: float, size: float) -> Iterator[Label]:
    beside, above, middle, below = size * 0.6, y - size * 0.6, y + size * 0.33, y + size * 1.3
    for height in (above, below, middle):
        yield Label(text, x + beside, height, "start", size)
        yield Label(text, x - beside, height, "end", size)
    yield Label(text, x, above, "middle", size)
    yield Label(text, x, below, "middle", size)


def spread(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places for labels as near to the ascending `values` as lets them stand `gap` apart, between `low` and `high`.

    Neighbours that are too near are joined, and a group stands around the mean of its values. Where there is no room
    for all of them, they stand as far apart as there is.
    """
    gap = min(gap, (high - low) / max(len(values) - 1, 1))
    groups: list[list[float]] = []

    def start(group: Sequence[float]) -> float:
        length = gap * (len(group) - 1)
        return min(max(sum(group) / len(group) - length / 2, low), high - length)

    for value in values:
        groups.append([value])
        while len(groups) > 1 and start(groups[-1]) < start(groups[-2]) + gap * len(groups[-2]):
            last = groups.pop()
            groups[-1] += last
    return [start(group) + gap * at for group in groups for at in range(len(group))]
