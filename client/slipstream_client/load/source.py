"""What a workload is made from: requests by their lengths or prompts, before they are scaled and put in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream_client.errors import SlipstreamError

MOST_TOKENS = 1 << 20  # of one prompt or answer


@dataclass(frozen=True, slots=True)
class Entry:
    """One request to be made: of a prompt, or of as many words as `input_tokens` says."""

    input_tokens: int | None  # without the shared prefix; None: a prompt whose tokens nobody has counted
    output_tokens: int | None  # None: the answer ends by itself
    prompt: str | None = None
    max_tokens: int | None = None  # None: the source's
    prefix: int | None = None  # which of the source's prefixes it begins with


@dataclass(frozen=True)
class Source:
    """The entries, in the order in which they are offered."""

    entries: tuple[Entry, ...]
    max_tokens: int  # the limit of every request that states none of its own
    about: dict[str, Any]  # what describe() says of it
    prefixes: int = 0  # how many different ones
    prefix_tokens: int = 0  # of each


def refused(place: str, field: str, value: object, allowed: str) -> SlipstreamError:
    """The error of a value that is out of range or of another kind than `allowed`."""
    shown = repr(value)
    return SlipstreamError(f"{place}: {field} is {shown[:60]}{'...' if shown[60:] else ''}; allowed: {allowed}")


def whole_number(place: str, field: str, value: object, low: int = 1, high: int = MOST_TOKENS) -> int:
    """`value`, which is one.

    Raises:
        SlipstreamError: it is none, or out of range.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise refused(place, field, value, f"whole numbers from {low} to {high}")
    return value
