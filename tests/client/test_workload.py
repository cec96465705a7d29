"""The offered requests: seeded, stable, with lengths of their own streams, and as many tokens as words."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream_client.errors import SlipstreamError
from slipstream_client.load.streams import Stream, generator
from slipstream_client.load.words import WORDS
from slipstream_client.load.workload import Workload, make_workload

TOKENIZER = (
    Path(os.environ.get("SLIPSTREAM_CACHE") or Path.home() / ".cache/slipstream") / "models/smollm2-135m/tokenizer.json"
)


def test_mixed_is_the_same_sequence_for_ever() -> None:
    workload = make_workload("mixed", 128, seed=0)
    lengths = [(request.input_tokens, request.stop_length) for request in workload.requests[:4]]
    assert lengths == FIRST_MIXED_LENGTHS
    assert workload.sha256 == MIXED_SHA256


# numpy promises nothing about its streams between releases: where these change, results before and after are of
# different requests, and that must be noticed.
FIRST_MIXED_LENGTHS = [(148, 65), (23, 4), (84, 4), (47, 74)]
MIXED_SHA256 = "28790aa8e07adda10a82c8355939851ec9ef1a4216886288b437bb5e77427727"
# Of 16 requests, seed 0.
SHA256 = {
    "mixed": "b7666177a5f03e0c669fcfa305dba544c8ef71ff761d146887d28efda3616402",
    "equal": "7fdee71caaf7dd84254c9154fc62d6100163acdfaf9419745e514bbc9141583f",
    "fixed:5,9": "558abb669849f73a065629c2b8f0b9a014dddcb9f019709ad95e5a6da878f320",
    "alpaca-like": "2a31cdcd4e016e6c51ca342af96d63dac12c3094492113676bd1d311f81b7a16",
    "sharegpt-like": "cc1fcbdece7b4b08e867febfe3f86109fb50b9d43ac6d8ba371ffeb50f111fd7",
    "arxiv-summarization": "8a884e47967f71b43de02199f38e1d94914fe22e6071028a0db7b3e60f85004b",
    "azure-conv": "4648476b0a33b0191e142943dad34c19ef59e1571d496ceaad7242c009d68a5d",
    "azure-code": "4ab7c0f54ffc845f83dfd2c2a46a66db588f6b45c54bdc26544695eebe767d9c",
    "mooncake-conv": "a33d8e3dca9e159ff63780af9942cc6410eea50e6fee3e3787e98f2856c0a388",
    "variance:1.5": "06d91b252c14d0d827f34038df8a42d85f930d01752a1acc54d8560c180defdf",
    "shared-prefix:32,4": "834ada27cf1faf6278cc2472e0b09977d8037ada8402c4a02ab236ef2564da13",
    "shared-prefix:32,4,8,6": "576a6a072135abbbab291a1751dce259a6dc4e665e4956df02f0a11d71e639e2",
}


@pytest.mark.parametrize("name", SHA256)
def test_every_workload_is_the_same_sequence_for_ever(name: str) -> None:
    assert make_workload(name, 16).sha256 == SHA256[name]


@pytest.mark.parametrize(
    ("name", "same_as"),
    [
        ("short-short", "alpaca-like"),
        ("short-long", "sharegpt-like"),
        ("long-short", "arxiv-summarization"),
        ("variance:0", "equal"),
        ("fixed:64,48", "equal"),
    ],
)
def test_two_names_of_one_sequence(name: str, same_as: str) -> None:
    assert make_workload(name, 16).sha256 == SHA256[same_as]


@pytest.mark.parametrize("name", ["mixed", "azure-code", "short-long", "variance:2", "shared-prefix:8,3"])
def test_a_longer_sequence_begins_with_the_shorter_one(name: str) -> None:
    assert make_workload(name, 128, seed=3).requests[:48] == make_workload(name, 48, seed=3).requests


def test_another_seed_is_another_sequence() -> None:
    assert make_workload("mixed", 16, seed=0).sha256 != make_workload("mixed", 16, seed=1).sha256


def test_streams_are_the_children_of_one_seed() -> None:
    children = np.random.SeedSequence(7).spawn(len(Stream))
    drawn = [generator(7, stream).random() for stream in Stream]
    assert drawn == [np.random.default_rng(child).random() for child in children]
    assert len(set(drawn)) == len(Stream)


def test_texts_do_not_depend_on_how_outputs_are_drawn() -> None:
    equal, fixed = make_workload("equal", 8), make_workload("fixed:64,5", 8)
    assert texts(equal) == texts(fixed)
    assert texts(make_workload("mixed", 8)) == texts(make_workload("mixed", 8, max_output=5))


def test_own_texts_do_not_depend_on_prefixes_and_prefixes_not_on_texts() -> None:
    plain, shared = make_workload("mixed", 32), make_workload("shared-prefix:10,3", 32)
    firsts = [text.split(" ")[:10] for text in texts(shared)]
    assert [" ".join(text.split(" ")[10:]) for text in texts(shared)] == texts(plain)
    assert len({tuple(first) for first in firsts}) == 3
    other = make_workload("shared-prefix:10,3,4,4", 32)
    assert [text.split(" ")[:10] for text in texts(other)] == firsts
    assert [request.input_tokens for request in other.requests] == [14] * 32


def test_input_and_output_lengths_are_independent() -> None:
    requests = make_workload("mixed", 4000).requests
    pairs = np.array([(request.input_tokens, request.stop_length) for request in requests])
    assert abs(np.corrcoef(np.log(pairs.T))[0, 1]) < 0.05


def test_every_request_states_the_same_limit_and_its_own_end() -> None:
    for request in make_workload("mixed", 32).requests:
        sampling = request.sampling()
        assert sampling["max_tokens"] == 384
        assert sampling["stop_length"] == request.stop_length
        assert sampling["ignore_eos"] is True
        assert len(request.text.split(" ")) == request.input_tokens


@pytest.mark.parametrize(
    ("name", "options", "limit"),
    # The longest answer that can be drawn, and where all are equal the limit of `mixed`.
    [
        ("azure-conv", {}, 1000),
        ("azure-conv", {"scale": 0.1}, 100),
        ("azure-conv", {"scale": 0.1, "max_output": 64}, 64),
        ("short-long", {}, 2048),
        ("short-short", {}, 512),
        ("variance:3", {}, 384),
        ("equal", {"scale": 0.5}, 192),
        ("fixed:5,400", {}, 400),
        ("shared-prefix:8,2,5,6", {}, 384),
    ],
)
def test_the_limit_is_the_longest_answer_that_can_be_drawn(name: str, options: dict[str, Any], limit: int) -> None:
    requests = make_workload(name, 8, **options).requests
    assert {request.max_tokens for request in requests} == {limit}
    assert all(request.stop_length <= limit for request in requests)


@pytest.mark.parametrize(("name", "lengths"), [("equal", (64, 48)), ("fixed:5,9", (5, 9)), ("fixed:7,385", (7, 385))])
def test_fixed_lengths(name: str, lengths: tuple[int, int]) -> None:
    requests = make_workload(name, 3).requests
    assert [(request.input_tokens, request.stop_length) for request in requests] == [lengths] * 3


def test_lengths_are_scaled_rounded_and_never_nothing() -> None:
    plain, scaled = make_workload("mixed", 200), make_workload("mixed", 200, scale=0.1)
    for one, other in zip(plain.requests, scaled.requests, strict=True):
        assert other.input_tokens == max(1, round(one.input_tokens / 10))  # type: ignore[operator]
        assert other.stop_length == max(1, round(one.stop_length / 10))
        assert len(other.text.split(" ")) == other.input_tokens
    assert min(request.stop_length for request in scaled.requests) == 1
    assert make_workload("mixed", 200, scale=1.0).sha256 == plain.sha256


def test_lengths_are_cut_to_the_limits_and_the_cut_ones_counted() -> None:
    plain, cut = make_workload("mixed", 200), make_workload("mixed", 200, max_input=50, max_output=20)
    for one, other in zip(plain.requests, cut.requests, strict=True):
        assert other.text.split(" ") == one.text.split(" ")[:50]
        assert other.stop_length == min(one.stop_length, 20)
    assert cut.describe()["cut"] == {
        "input": sum(request.input_tokens > 50 for request in plain.requests),  # type: ignore[operator]
        "output": sum(request.stop_length > 20 for request in plain.requests),
    }
    assert plain.describe()["cut"] == {"input": 0, "output": 0}


def test_a_prefix_is_scaled_and_cut_with_its_prompt() -> None:
    (request,) = make_workload("shared-prefix:40,1,20,4", 1, scale=0.5).requests
    (short,) = make_workload("shared-prefix:40,1,20,4", 1, scale=0.5, max_input=22).requests
    assert (request.input_tokens, short.input_tokens) == (20 + 10, 22)
    assert short.text.split(" ") == request.text.split(" ")[:22]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope", "no workload 'nope'; there are mixed, equal, short-short, .*variance:SIGMA.*FILE.jsonl"),
        ("Mixed", "no workload 'Mixed'"),
        ("nope:3", "no workload 'nope:3'"),
        ("fixed:5", "workload fixed:5 is not spelled fixed:IN,OUT"),
        ("fixed:0,5", "workload fixed:0,5: IN is 0; allowed: whole numbers from 1 to 1048576"),
        ("fixed:5,0", "workload fixed:5,0: OUT is 0; allowed"),
        ("fixed:5,1048577", "OUT is 1048577; allowed"),
        ("fixed:a,b", "workload fixed:a,b: IN is 'a'; allowed"),
        ("fixed:5,-1", "OUT is '-1'; allowed"),
        ("variance:3.1", r"workload variance:3.1: SIGMA is '3.1'; allowed: numbers from 0 \(equal lengths\) to 3"),
        ("variance:wide", "SIGMA is 'wide'"),
        ("variance:nan", "SIGMA is 'nan'"),
        ("variance:1,2", "is not spelled variance:SIGMA"),
        ("shared-prefix:8", "is not spelled shared-prefix:TOKENS,PREFIXES"),
        ("shared-prefix:0,4", "TOKENS is 0"),
        ("shared-prefix:8,4097", "PREFIXES is 4097; allowed: whole numbers from 1 to 4096"),
        ("shared-prefix:8,4,5,0", "OUT is 0"),
    ],
)
def test_a_workload_that_is_none_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(SlipstreamError, match=message):
        make_workload(name, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 0.0}, "workload: scale is 0.0; allowed: numbers from 0.001 to 10"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"max_input": 0}, "workload: max_input is 0; allowed: whole numbers from 1 to 1048576"),
        ({"max_output": -3}, "max_output is -3"),
        ({"seed": -1}, "seed is -1"),
        ({"count": 0}, "requests is 0"),
    ],
)
def test_values_out_of_range_are_refused_by_field(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SlipstreamError, match=re.escape(message)):
        make_workload("mixed", **({"count": 1} | options))


def test_description_names_the_hash_and_the_spread() -> None:
    workload = make_workload("fixed:5,9", 4, seed=7)
    assert workload.describe() == {
        "name": "fixed:5,9",
        "seed": 7,
        "sha256": workload.sha256,
        "requests": 4,
        "source": "own choice",
        "lengths": {"input": "always 5", "output": "always 9"},
        "scale": 1.0,
        "max_input": None,
        "max_output": None,
        "cut": {"input": 0, "output": 0},
        "input_tokens": {"mean": 5.0, "min": 5, "p50": 5.0, "p90": 5.0, "max": 5, "total": 20, "cv": 0.0},
        "output_tokens": {"mean": 9.0, "min": 9, "p50": 9.0, "p90": 9.0, "max": 9, "total": 36, "cv": 0.0},
        "uncounted": 0,
        "unbounded": 0,
        "max_tokens": 384,
        "temperature": 0,
    }


def test_description_names_the_source_of_a_trace_and_counts_prefixes() -> None:
    described = make_workload("azure-conv", 64, scale=0.1).describe()
    assert described["source"] == "Azure LLM inference trace 2023, conversation (Splitwise), CC-BY 4.0"
    assert described["lengths"]["output"] == "percentiles of a trace, 7..1000, mean 214.0 (the trace's own: 211.1)"
    assert described["scale"] == 0.1
    shared = make_workload("shared-prefix:40,100,5,5", 10).describe()
    assert shared["prefixes"]["different"] == 100
    assert shared["prefixes"]["tokens"] == 40
    assert 5 <= shared["prefixes"]["used"] <= 10


def test_words_are_distinct() -> None:
    assert len(set(WORDS)) == len(WORDS)


@pytest.mark.skipif(not TOKENIZER.exists(), reason="the demo model is not in the cache")
@pytest.mark.parametrize("name", ["mixed", "shared-prefix:40,4"])
def test_a_text_has_as_many_tokens_as_words_for_the_demo_model(name: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    for request in make_workload(name, 64).requests:
        assert len(tokenizer.encode(request.text).ids) == request.input_tokens
    assert all(len(tokenizer.encode(text).ids) == 1 for word in WORDS for text in (word, f" {word}"))


def texts(workload: Workload) -> list[str]:
    return [request.text for request in workload.requests]


def test_a_context_that_is_too_short_for_a_request_and_its_answer_is_refused_with_a_scale_that_fits() -> None:
    workload = make_workload("fixed:300,50", 4)
    workload.require_room(684, "continuous")
    with pytest.raises(SlipstreamError) as error:
        workload.require_room(683, "continuous")
    assert str(error.value) == (
        "workload fixed:300,50: request 0 has 300 prompt tokens and max_tokens 384; together at most 683 are allowed "
        "(context of continuous): give --scale 0.99 or --max-input, --max-output"
    )
    make_workload("fixed:300,50", 4, scale=0.99).require_room(683, "continuous")
