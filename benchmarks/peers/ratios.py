"""What two sides did at the same points, round by round, and the table of their ratios. Knows no engine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Side = Literal["ours", "peer"]


@dataclass(frozen=True, eq=False)
class Point:
    """What is compared. The bar is the least median of ours / peer that is asked for; the most, where `at_most`."""

    name: str
    unit: str = "tokens/s"
    bar: float | None = None
    at_most: bool = False  # of a time, where less is better

    def met(self, ratio: float) -> bool | None:
        """Whether a ratio is what is asked for; None where nothing is."""
        if self.bar is None:
            return None
        return ratio <= self.bar if self.at_most else ratio >= self.bar


Values = Mapping[Point, float]  # in each point's unit


class Unavailable(Exception):
    """A side cannot do this here at all, and why: its points say so, and the others go on."""


@dataclass(frozen=True)
class Piece:
    """Points that a side measures in one go. Both sides are called with the round's number, from 0 on."""

    points: Sequence[Point]
    ours: Callable[[int], Values]
    peer: Callable[[int], Values]


@dataclass(frozen=True)
class Part:
    """One table."""

    name: str
    title: str
    pieces: Sequence[Piece]


@dataclass
class Found:
    """What both sides did at one point, a value for each round; or why there is none."""

    point: Point
    ours: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)
    unavailable: str = ""

    @property
    def ratios(self) -> list[float]:
        """Ours / peer of each round: what drifts from one round to the next is not in it."""
        return [ours / peer for ours, peer in zip(self.ours, self.peer, strict=True)]

    def newest(self) -> str:
        """One line on the last round."""
        if self.unavailable:
            return f"{self.point.name}: n/a, {self.unavailable}"
        ours, peer = self.ours[-1], self.peer[-1]
        return f"{self.point.name}: {ours:.1f} / {peer:.1f} {self.point.unit} = {ours / peer:.2f}"

    def describe(self) -> dict[str, Any]:
        """For JSON."""
        point = self.point
        described: dict[str, Any] = {"point": point.name, "unit": point.unit, "bar": point.bar}
        described |= {"bar_is": "most" if point.at_most else "least"} if point.bar is not None else {}
        if self.unavailable:
            return described | {"unavailable": self.unavailable}
        median = statistics.median(self.ratios)
        described |= {"ours": self.ours, "peer": self.peer, "ratios": self.ratios, "median": median}
        return described | {"met": point.met(median)}


def measure(piece: Piece, number: int, found: Mapping[Point, Found]) -> None:
    """Both sides of round `number`, in the opposite order in every other one, so that what drifts favours neither."""
    sides: list[Side] = ["ours", "peer"] if number % 2 == 0 else ["peer", "ours"]
    if any(found[point].unavailable for point in piece.points):
        return
    values: dict[Side, Values] = {}
    try:
        for side in sides:
            values[side] = piece.ours(number) if side == "ours" else piece.peer(number)
    except Unavailable as error:
        for point in piece.points:
            found[point].unavailable = str(error)
        return
    for point in piece.points:
        found[point].ours.append(values["ours"][point])
        found[point].peer.append(values["peer"][point])


def table(title: str, found: Sequence[Found]) -> str:
    """In Markdown: the medians over the rounds of either side, and of the rounds' ratios with their spread."""
    lines = [
        f"### {title}",
        "",
        "| point | ours | peer | ours / peer | least to most | bar | |",
        "|---|---:|---:|---:|---:|---:|---|",
        *map(_row, found),
    ]
    reasons = dict.fromkeys(each.unavailable for each in found if each.unavailable)
    if reasons:
        lines += ["", *(f"n/a: {reason}" for reason in reasons)]
    return "\n".join(lines) + "\n"


def _row(found: Found) -> str:
    point = found.point
    bar = "" if point.bar is None else f"{'at most' if point.at_most else 'at least'} {point.bar:g}"
    if found.unavailable:
        return f"| {point.name}, {point.unit} | n/a | n/a | n/a | | {bar} | n/a |"
    ratios = found.ratios
    median = statistics.median(ratios)
    met = {True: "met", False: "NOT MET", None: ""}[point.met(median)]
    ours, peer = statistics.median(found.ours), statistics.median(found.peer)
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return f"| {point.name}, {point.unit} | {ours:.1f} | {peer:.1f} | {median:.2f} | {spread} | {bar} | {met} |"
