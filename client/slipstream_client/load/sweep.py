"""The points of a sweep as they are typed: 1,4,16 or, as perf_analyzer takes them, 1:16:5 (first:last:step)."""

from __future__ import annotations

import math
from collections.abc import Callable

from slipstream_client.errors import SlipstreamError

_MOST_POINTS = 1000


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """Each number once, in the order in which they are typed; a range includes its last where a step lands on it.

    Raises:
        SlipstreamError: something in it is no whole number from 1.
    """
    numbers = _points(option, text, int, "whole numbers")
    if min(numbers) < 1:
        raise SlipstreamError(f"{option} {text!r}: every number must be at least 1")
    return tuple(int(number) for number in numbers)


def rates(option: str, text: str) -> tuple[float, ...]:
    """As whole_numbers, of requests per second; `inf` is all at once.

    Raises:
        SlipstreamError: something in it is no number above 0.
    """
    numbers = _points(option, text, float, "numbers")
    if not all(number > 0 for number in numbers):
        raise SlipstreamError(f"{option} {text!r}: every number must be above 0")
    return tuple(numbers)


def _points(option: str, text: str, parse: Callable[[str], float], kind: str) -> list[float]:
    points: list[float] = []
    for part in text.split(","):
        try:
            bounds = [parse(bound) for bound in part.split(":")]
        except ValueError:
            raise SlipstreamError(f"{option} {text!r} is no list of {kind}") from None
        points += bounds if len(bounds) == 1 else _range(f"{option} {text!r}", bounds)
    return list(dict.fromkeys(points))


def _range(place: str, bounds: list[float]) -> list[float]:
    first, last, step, *more = (*bounds, 1) if len(bounds) == 2 else bounds
    # A step of a tenth must not miss its end by the last bit.
    steps = math.floor((last - first) / step + 1e-9) if all(map(math.isfinite, bounds)) and step > 0 else -1
    if more or not 0 <= steps < _MOST_POINTS:
        raise SlipstreamError(
            f"{place}: a range is first:last or first:last:step, ascending, of at most {_MOST_POINTS} numbers"
        )
    return [round(first + step * at, 9) for at in range(steps + 1)]
