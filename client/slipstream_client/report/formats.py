"""How figures are written: the same everywhere, and a dash for what is missing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any


def number(value: float | None, digits: int = 0) -> str:
    """Thousands separated, with a fixed count of decimals so that a column lines up."""
    return "—" if value is None else f"{value:,.{digits}f}"


def short(value: float) -> str:
    """Three digits, more only before the point."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share in per cent."""
    return "—" if value is None else f"{value * 100:.{digits}f}%"


def whole_percents(shares: Sequence[float]) -> list[str]:
    """Shares of one whole, rounded so that they add up to it: the largest remainders are rounded up."""
    exact = [share * 100 for share in shares]
    found = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda at: found[at] - exact[at])
    for at in by_remainder[: round(sum(exact)) - sum(found)]:
        found[at] += 1
    return [f"{value}%" for value in found]


def times(value: float) -> str:
    """A ratio as people say it: "3.1x", "0.27x", "12x"."""
    return f"{value:.0f}x" if value >= 9.95 else f"{value:.1f}x" if value >= 1.95 else f"{value:.2f}x"


def duration(milliseconds: float | None) -> str:
    """Milliseconds in the unit people read."""
    if milliseconds is None:
        return "—"
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:.3g} s" if milliseconds < 99_950 else f"{milliseconds / 1000:,.0f} s"
    return f"{milliseconds:.0f} ms" if milliseconds >= 9.95 else f"{milliseconds:.2g} ms"


def size(value: float | None) -> str:
    """Bytes in the unit people read."""
    if value is None:
        return "—"
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"


def listed(words: list[str], last: str = "and") -> str:
    """ "a, b and c"."""
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def flatten(value: dict, prefix: str = "") -> Iterator[tuple[str, str]]:
    """A nested description as "a.b", text pairs; a group of nothing but numbers stays one pair."""
    for key, item in value.items():
        if isinstance(item, dict) and all(type(part) in (int, float) for part in item.values()):
            yield f"{prefix}{key}", ", ".join(f"{name} {_plain(name, part)}" for name, part in item.items()) or "none"
        elif isinstance(item, dict):
            yield from flatten(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _plain(key, item)


def _plain(key: str, item: Any) -> str:
    if item is None:
        return "—"
    if isinstance(item, bool):
        return "yes" if item else "no"
    if isinstance(item, (list, tuple)):
        return ", ".join(_plain(key, part) for part in item) or "none"
    if isinstance(item, (int, float)) and key.endswith("_bytes"):
        return size(item)
    return f"{item:.6g}" if isinstance(item, float) else str(item)
