"""The requests of a comparison: seeded, so that every batcher gets the same ones, and named by a hash.

How long an answer really is travels as `stop_length`, which ends it as an end-of-sequence token would; the limit that
a scheduler sees is `max_tokens`, the same for all.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from slipstream_client.errors import SlipstreamError
from slipstream_client.load.words import WORDS

MAX_TOKENS = 384
_LONGEST_INPUT = 1 << 20
EQUAL_LENGTHS = (64, 48)


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request as it is offered."""

    index: int
    text: str
    input_tokens: int  # words of `text`: its tokens with the demo model's tokenizer
    stop_length: int  # output tokens after which the answer ends by itself
    max_tokens: int  # the limit that the request states

    def sampling(self) -> dict[str, Any]:
        """Its sampling parameters: greedy, and with the output ids in the answer."""
        return {
            "temperature": 0,
            "max_tokens": self.max_tokens,
            "stop_length": self.stop_length,
            "ignore_eos": True,
            "return_token_ids": True,
        }


@dataclass(frozen=True)
class LogNormal:
    """A lognormal distribution given by its own mean (not that of its logarithm), rounded and clipped."""

    mean: float
    sigma: float
    low: int
    high: int

    def sample(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """Draw `count` whole numbers."""  # [count] int64
        mu = math.log(self.mean) - self.sigma**2 / 2
        drawn = np.rint(generator.lognormal(mu, self.sigma, count))
        return np.clip(drawn, self.low, self.high).astype(np.int64)


MIXED_INPUT = LogNormal(mean=64, sigma=0.8, low=8, high=512)
MIXED_OUTPUT = LogNormal(mean=48, sigma=1.0, low=4, high=384)


@dataclass(frozen=True)
class Workload:
    """A sequence of requests; the first n of a longer one are the same requests."""

    name: str
    seed: int
    requests: tuple[WorkloadRequest, ...]

    @property
    def sha256(self) -> str:
        """Hash of everything that is offered: texts, lengths and limits, in order."""
        digest = hashlib.sha256()
        for request in self.requests:
            digest.update(json.dumps(asdict(request), sort_keys=True).encode() + b"\n")
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """What results.json says about it."""
        return {
            "name": self.name,
            "seed": self.seed,
            "sha256": self.sha256,
            "requests": len(self.requests),
            "input_tokens": _spread([request.input_tokens for request in self.requests]),
            "output_tokens": _spread([request.stop_length for request in self.requests]),
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
        }


def make_workload(name: str, count: int, seed: int = 0) -> Workload:
    """Draw `count` requests of `mixed`, `equal` (64 tokens in, 48 out) or `fixed:IN,OUT`.

    Raises:
        SlipstreamError: no such workload.
    """
    # One stream each, so that no choice of lengths changes the texts, and a longer sequence begins with a shorter one.
    inputs, outputs, texts = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(3))
    if name == "mixed":
        input_lengths = MIXED_INPUT.sample(inputs, count)
        output_lengths = MIXED_OUTPUT.sample(outputs, count)
    else:
        input_length, output_length = _fixed_lengths(name)
        input_lengths = np.full(count, input_length)
        output_lengths = np.full(count, output_length)
    requests = tuple(
        WorkloadRequest(
            index=index,
            text=" ".join(WORDS[word] for word in texts.integers(len(WORDS), size=int(input_lengths[index]))),
            input_tokens=int(input_lengths[index]),
            stop_length=int(output_lengths[index]),
            max_tokens=MAX_TOKENS,
        )
        for index in range(count)
    )
    return Workload(name, seed, requests)


def _fixed_lengths(name: str) -> tuple[int, int]:
    if name == "equal":
        return EQUAL_LENGTHS
    match = re.fullmatch(r"fixed:(\d+),(\d+)", name)
    if not match:
        raise SlipstreamError(f"no workload {name!r}; there are mixed, equal and fixed:IN,OUT (tokens)")
    input_length, output_length = int(match[1]), int(match[2])
    if not 1 <= input_length <= _LONGEST_INPUT or not 1 <= output_length <= MAX_TOKENS:
        raise SlipstreamError(f"workload {name}: IN is 1 to {_LONGEST_INPUT}, OUT 1 to {MAX_TOKENS}")
    return input_length, output_length


def _spread(lengths: list[int]) -> dict[str, float]:
    return {"mean": float(np.mean(lengths)), "min": min(lengths), "max": max(lengths), "total": sum(lengths)}
