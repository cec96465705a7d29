"""How each variant looks everywhere: a colour for each background, and a marker and a line that work without colour."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Style:
    """The look of one variant."""

    light: str
    dark: str
    marker: str
    line: str = "-"


# Darkened and lightened from the Okabe-Ito palette, so that they also carry text on white and on near-black.
STYLES = {
    "continuous": Style("#0072B2", "#56A8E0", "o"),
    "dynamic": Style("#C14E00", "#F0803C", "s"),
    "static": Style("#8A4A7D", "#DC9CC4", "D", "--"),  # dashed on top: it often lies exactly on `dynamic`
    "iterative": Style("#00805E", "#3FC79C", "^"),
}
SPARE_STYLES = (
    Style("#7A5C00", "#E5B93C", "v"),
    Style("#555555", "#BBBBBB", "P"),
    Style("#5B3FBF", "#A794F0", "X"),
    Style("#A8123E", "#FF8FA8", "<", "--"),
    Style("#00708A", "#5CC8E0", ">", "--"),
    Style("#4A6B00", "#A9CF4A", "p", "--"),
)


def styles_of(names: Iterable[str]) -> dict[str, Style]:
    """One style a variant, the four batchers always the same.

    Another variant's place among the spare ones follows from its name, so that it keeps its look from report to report;
    where two would share one, the later takes the next that is free.
    """
    styles: dict[str, Style] = {}
    free = list(SPARE_STYLES)
    for name in dict.fromkeys(names):
        if name in STYLES:
            styles[name] = STYLES[name]
            continue
        free = free or list(SPARE_STYLES)
        wanted = zlib.crc32(name.encode()) % len(SPARE_STYLES)
        ordered = [*SPARE_STYLES[wanted:], *SPARE_STYLES[:wanted]]
        styles[name] = next(style for style in ordered if style in free)
        free.remove(styles[name])
    return styles
