"""The random streams of one seed: one for each purpose, so that no choice in one changes what another draws."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """What is drawn; the numbers are part of every published hash, so a new stream takes the next one."""

    INPUTS = 0
    OUTPUTS = 1
    TEXTS = 2
    ARRIVALS = 3
    PREFIXES = 4  # which of the shared prefixes a request begins with
    PREFIX_TEXTS = 5
    ORDER = 6  # of a file's entries


def generator(seed: int, stream: Stream) -> np.random.Generator:
    """The stream's generator: child number `stream` of the seed's SeedSequence."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(int(stream),)))
