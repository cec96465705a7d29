"""The requests of a comparison: seeded, so that every batcher gets the same ones, and named by a hash.

How long an answer really is travels as `stop_length`, which ends it as an end-of-sequence token would; the limit that
a scheduler sees is `max_tokens`: the longest answer that the workload can draw, the same for all of its requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from slipstream_client.errors import SlipstreamError
from slipstream_client.load.arrivals import offered_sha256
from slipstream_client.load.datasets import SUFFIXES, read_dataset
from slipstream_client.load.named_workloads import population
from slipstream_client.load.source import Entry, Source, refused, whole_number
from slipstream_client.load.streams import Stream, generator
from slipstream_client.load.words import WORDS

_SCALES = (0.001, 10.0)


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request as it is offered."""

    index: int
    text: str
    input_tokens: int | None  # words of `text`: its tokens with the demo model's tokenizer; None: a user's prompt
    stop_length: int  # output tokens after which the answer ends by itself; 0: where the model or max_tokens ends it
    max_tokens: int  # the limit that the request states

    def sampling(self) -> dict[str, Any]:
        """Its sampling parameters: greedy, and with the output ids in the answer."""
        sampling = {"temperature": 0, "max_tokens": self.max_tokens, "return_token_ids": True}
        return sampling | {"stop_length": self.stop_length, "ignore_eos": True} if self.stop_length else sampling


@dataclass(frozen=True)
class Fit:
    """How lengths are made to suit a small model: all scaled by one factor, rounded, at least 1; then cut to limits."""

    scale: float = 1.0
    max_input: int | None = None  # tokens
    max_output: int | None = None

    def __post_init__(self) -> None:
        low, high = _SCALES
        if not low <= self.scale <= high:
            raise refused("workload", "scale", self.scale, f"numbers from {low:g} to {high:g}")
        for field in ("max_input", "max_output"):
            if getattr(self, field) is not None:
                whole_number("workload", field, getattr(self, field))

    def scaled(self, tokens: int) -> int:
        """`tokens` before any cut."""
        return max(1, round(tokens * self.scale))

    def output(self, tokens: int) -> int:
        """Tokens of an answer, or the limit that it states."""
        scaled = self.scaled(tokens)
        return scaled if self.max_output is None else min(scaled, self.max_output)


@dataclass(frozen=True)
class Workload:
    """A sequence of requests; the first n of a longer one are the same requests."""

    name: str
    seed: int
    requests: tuple[WorkloadRequest, ...]
    fit: Fit
    cut: dict[str, int]  # how many requests' "input" and "output" were cut to the limits
    about: dict[str, Any]

    @property
    def scale(self) -> float:
        """The factor of all lengths."""
        return self.fit.scale

    @cached_property
    def sha256(self) -> str:
        """Hash of everything that is offered: texts, lengths and limits, in order."""
        return offered_sha256(self.requests)

    def require_room(self, context: int, whose: str) -> None:
        """Refuse a context of `context` tokens if a prompt and the longest answer it may get do not fit into it.

        Raises:
            SlipstreamError: which request, and what scale would fit.
        """
        longest = max(self.requests, key=lambda request: (request.input_tokens or 0) + request.max_tokens)
        tokens = (longest.input_tokens or 0) + longest.max_tokens
        if tokens <= context:
            return
        prompt = f"{longest.input_tokens} prompt tokens and " if longest.input_tokens else ""
        fitting = math.floor(100 * self.scale * context / tokens) / 100
        raise SlipstreamError(
            f"workload {self.name}: request {longest.index} has {prompt}max_tokens {longest.max_tokens}; together at "
            f"most {context} are allowed (context of {whose}): give --scale {fitting:g} or --max-input, --max-output"
        )

    def describe(self) -> dict[str, Any]:
        """What results.json says about it; lengths are those offered, after scaling and cutting.

        `uncounted` prompts are a user's, whose tokens only the server knows; `unbounded` answers end by themselves.
        Neither is in the figures of lengths.
        """
        inputs = [request.input_tokens for request in self.requests if request.input_tokens is not None]
        outputs = [request.stop_length for request in self.requests if request.stop_length]
        limits = [request.max_tokens for request in self.requests]
        return {
            "name": self.name,
            "seed": self.seed,
            "sha256": self.sha256,
            "requests": len(self.requests),
            **self.about,
            "scale": self.fit.scale,
            "max_input": self.fit.max_input,
            "max_output": self.fit.max_output,
            "cut": self.cut,
            "input_tokens": _spread(inputs),
            "output_tokens": _spread(outputs),
            "uncounted": len(self.requests) - len(inputs),
            "unbounded": len(self.requests) - len(outputs),
            "max_tokens": limits[0] if min(limits) == max(limits) else _spread(limits),
            "temperature": 0,
        }


def make_workload(
    name: str,
    count: int,
    seed: int = 0,
    *,
    scale: float = 1.0,
    max_input: int | None = None,
    max_output: int | None = None,
) -> Workload:
    """Make `count` requests of a named workload (named_workloads.py) or of a file (datasets.py).

    Raises:
        SlipstreamError: no such workload or file, or a value in it is out of range.
    """
    fit = Fit(scale, max_input, max_output)
    whole_number("workload", "requests", count)
    whole_number("workload", "seed", seed, low=0, high=2**63 - 1)
    is_file = name.endswith(SUFFIXES)
    source = read_dataset(name, count, seed) if is_file else population(name).draw(count, seed)
    requests, cut = _fitted(source, fit, seed)
    return Workload(Path(name).name if is_file else name, seed, requests, fit, cut, source.about)


def _fitted(source: Source, fit: Fit, seed: int) -> tuple[tuple[WorkloadRequest, ...], dict[str, int]]:
    """The requests of a source, and how many of them were cut."""
    if (fit.scale != 1 or fit.max_input) and any(entry.prompt is not None for entry in source.entries):
        raise SlipstreamError("scale and max_input are for lengths: a prompt that is given as text stays as it is")
    words = _Words(source, fit, seed)
    cut = {"input": 0, "output": 0}
    requests = []
    for index, entry in enumerate(source.entries):
        text, input_tokens = entry.prompt, entry.input_tokens
        if text is None:
            drawn = words.draw(entry)
            kept = drawn[: fit.max_input]
            text, input_tokens = " ".join(kept), len(kept)
            cut["input"] += len(kept) < len(drawn)
        stop_length = 0
        if entry.output_tokens is not None:
            stop_length = fit.output(entry.output_tokens)
            cut["output"] += stop_length < fit.scaled(entry.output_tokens)
        max_tokens = fit.output(entry.max_tokens or source.max_tokens)
        requests.append(WorkloadRequest(index, text, input_tokens, stop_length, max_tokens))
    return tuple(requests), cut


class _Words:
    """Words of a source's prompts, each word a token; the same ones whatever the limits are."""

    def __init__(self, source: Source, fit: Fit, seed: int) -> None:
        self._fit = fit
        self._texts = generator(seed, Stream.TEXTS)
        prefix_texts = generator(seed, Stream.PREFIX_TEXTS)
        self._prefixes = [_words(prefix_texts, fit.scaled(source.prefix_tokens)) for _ in range(source.prefixes)]

    def draw(self, entry: Entry) -> list[str]:
        """The prefix that the entry shares with others, if any, and words of its own."""
        assert entry.input_tokens is not None
        own = _words(self._texts, self._fit.scaled(entry.input_tokens))
        return own if entry.prefix is None else self._prefixes[entry.prefix] + own


def _words(texts: np.random.Generator, count: int) -> list[str]:
    return [WORDS[word] for word in texts.integers(len(WORDS), size=count)]


def _spread(lengths: Sequence[int]) -> dict[str, float] | None:
    """Mean, ends, percentiles, sum and coefficient of variation; None of nothing."""
    if not lengths:
        return None
    mean = float(np.mean(lengths))
    return {
        "mean": mean,
        "min": min(lengths),
        "p50": float(np.percentile(lengths, 50)),
        "p90": float(np.percentile(lengths, 90)),
        "max": max(lengths),
        "total": sum(lengths),
        "cv": float(np.std(lengths)) / mean,
    }
