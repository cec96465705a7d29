"""The workloads that have a name: from which distributions their lengths are drawn, and where these come from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from slipstream_client.errors import SlipstreamError
from slipstream_client.load.lengths import Constant, Lengths, LogNormal, QuantileTable
from slipstream_client.load.source import MOST_TOKENS, Entry, Source, refused, whole_number
from slipstream_client.load.streams import Stream, generator

MIXED_INPUT = LogNormal(mean=64, sigma=0.8, low=8, high=512)
MIXED_OUTPUT = LogNormal(mean=48, sigma=1.0, low=4, high=384)
EQUAL_LENGTHS = (64, 48)
# Where all answers are equally long too, so that the limit does not give their length away to a scheduler.
LEAST_MAX_TOKENS = MIXED_OUTPUT.high
# A lognormal has no end of its own. 2048 is the context of the models in the paper that the means are from; the other
# leaves 999 of 1000 answers as they are.
_LONGEST = {"sharegpt-like": 2048, "alpaca-like": 512}
_MOST_SIGMA = 3.0
_MOST_PREFIXES = 4096

_ALIASES = {"short-short": "alpaca-like", "short-long": "sharegpt-like", "long-short": "arxiv-summarization"}
_SPELLINGS = {
    "fixed": "fixed:IN,OUT",
    "variance": "variance:SIGMA",
    "shared-prefix": "shared-prefix:TOKENS,PREFIXES or shared-prefix:TOKENS,PREFIXES,IN,OUT",
}


@dataclass(frozen=True)
class Population:
    """What the requests of a named workload are drawn from, input and output lengths independently."""

    inputs: Lengths
    outputs: Lengths
    source: str
    max_tokens: int
    prefixes: int = 0
    prefix_tokens: int = 0

    def draw(self, count: int, seed: int) -> Source:
        """The first `count` requests of the seed's sequence."""
        inputs = self.inputs.sample(generator(seed, Stream.INPUTS), count).tolist()
        outputs = self.outputs.sample(generator(seed, Stream.OUTPUTS), count).tolist()
        about: dict[str, Any] = {
            "source": self.source,
            "lengths": {"input": str(self.inputs), "output": str(self.outputs)},
        }
        if not self.prefixes:
            entries = tuple(Entry(*lengths) for lengths in zip(inputs, outputs, strict=True))
            return Source(entries, self.max_tokens, about)
        groups = generator(seed, Stream.PREFIXES).integers(self.prefixes, size=count).tolist()
        entries = tuple(
            Entry(own, output, prefix=group) for own, output, group in zip(inputs, outputs, groups, strict=True)
        )
        about["prefixes"] = {"different": self.prefixes, "tokens": self.prefix_tokens, "used": len(set(groups))}
        return Source(entries, self.max_tokens, about, self.prefixes, self.prefix_tokens)


def population(name: str) -> Population:
    """Look a name up, or read a family's spelling.

    Raises:
        SlipstreamError: no such workload, or a number in it is out of range.
    """
    family, colon, arguments = name.partition(":")
    if colon and family in _SPELLINGS:
        return _of_family(name, family, arguments.split(","))
    if name == "mixed":
        return Population(MIXED_INPUT, MIXED_OUTPUT, "own choice", MIXED_OUTPUT.high)
    if name == "equal":
        return _fixed(*EQUAL_LENGTHS)
    published = _ALIASES.get(name, name)
    if published in _published()["traces"]:
        return _trace(_published()["traces"][published])
    if published in _published()["lognormal"]:
        return _lognormal(_published()["lognormal"][published], _LONGEST[published])
    known = ", ".join(["mixed", "equal", *_ALIASES, *_published()["traces"], *_published()["lognormal"]])
    families = ", ".join(_SPELLINGS.values())
    raise SlipstreamError(
        f"no workload {name!r}; there are {known}, {families} (lengths in tokens), FILE.jsonl (prompts or lengths) "
        "and FILE.json (ShareGPT)"
    )


def _of_family(name: str, family: str, arguments: list[str]) -> Population:
    place = f"workload {name}"
    if family == "variance" and len(arguments) == 1:
        return _variance(place, arguments[0])
    if family == "fixed" and len(arguments) == 2:
        return _fixed(*_in_and_out(place, arguments))
    if family == "shared-prefix" and len(arguments) in (2, 4):
        prefix_tokens = _number(place, "TOKENS", arguments[0])
        prefixes = _number(place, "PREFIXES", arguments[1], _MOST_PREFIXES)
        own = _fixed(*_in_and_out(place, arguments[2:])) if arguments[2:] else population("mixed")
        return Population(own.inputs, own.outputs, own.source, own.max_tokens, prefixes, prefix_tokens)
    raise SlipstreamError(f"{place} is not spelled {_SPELLINGS[family]}")


def _in_and_out(place: str, arguments: list[str]) -> tuple[int, int]:
    return _number(place, "IN", arguments[0]), _number(place, "OUT", arguments[1])


def _number(place: str, field: str, argument: str, high: int = MOST_TOKENS) -> int:
    digits = argument.isdecimal() and len(argument) <= len(str(high))
    return whole_number(place, field, int(argument) if digits else argument, high=high)


def _fixed(input_tokens: int, output_tokens: int) -> Population:
    inputs, outputs = Constant(input_tokens), Constant(output_tokens)
    return Population(inputs, outputs, "own choice", max(output_tokens, LEAST_MAX_TOKENS))


def _variance(place: str, argument: str) -> Population:
    """The means of `equal` at every sigma, between the bounds of `mixed`.

    Clipping would lower the means of the wide ones (at sigma 2 to 46 and 34 tokens), and a sweep would then compare
    less work with more; so the lognormal is shifted until the mean after clipping is that of `equal` again. What
    clipping takes from is the spread: at most about twice the mean, and the drawn lengths' own is in describe().
    """
    try:
        sigma = float(argument)
    except ValueError:
        sigma = -1.0
    if not 0 <= sigma <= _MOST_SIGMA:
        raise refused(place, "SIGMA", argument, f"numbers from 0 (equal lengths) to {_MOST_SIGMA:g}")
    if sigma == 0:
        return _fixed(*EQUAL_LENGTHS)
    inputs, outputs = (
        LogNormal.with_expected(mean, sigma, bounds.low, bounds.high)
        for mean, bounds in zip(EQUAL_LENGTHS, (MIXED_INPUT, MIXED_OUTPUT), strict=True)
    )
    return Population(inputs, outputs, "own choice", MIXED_OUTPUT.high)


def _trace(trace: dict[str, Any]) -> Population:
    inputs, outputs = (_table(trace, side) for side in ("input", "output"))
    return Population(inputs, outputs, trace["source"], outputs.high)


def _table(trace: dict[str, Any], side: str) -> QuantileTable:
    points = dict(zip(_published()["percentiles"], trace[side], strict=True))
    points |= {float(percentile): tokens for percentile, tokens in trace["tail"][side].items()}
    percentiles, tokens = zip(*sorted(points.items()), strict=True)
    return QuantileTable(percentiles, tokens, trace[f"mean_{side}"])


def _lognormal(shape: dict[str, Any], longest: int) -> Population:
    inputs, outputs = (
        LogNormal(shape[f"mean_{side}"], shape[f"sigma_{side}"], 1, longest) for side in ("input", "output")
    )
    return Population(inputs, outputs, shape["source"], outputs.high)


@cache
def _published() -> dict[str, Any]:
    return json.loads(resources.files("slipstream_client.load").joinpath("lengths.json").read_text(encoding="utf-8"))
