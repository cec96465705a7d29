"""The offered requests: seeded, stable, of the stated distributions, and as many tokens as words."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from slipstream_client.errors import SlipstreamError
from slipstream_client.load.words import WORDS
from slipstream_client.load.workload import MIXED_INPUT, MIXED_OUTPUT, make_workload

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


def test_a_longer_sequence_begins_with_the_shorter_one() -> None:
    assert make_workload("mixed", 128, seed=3).requests[:48] == make_workload("mixed", 48, seed=3).requests


def test_another_seed_is_another_sequence() -> None:
    assert make_workload("mixed", 16, seed=0).sha256 != make_workload("mixed", 16, seed=1).sha256


def test_texts_do_not_depend_on_how_outputs_are_drawn() -> None:
    equal, fixed = make_workload("equal", 8), make_workload("fixed:64,5", 8)
    assert [request.text for request in equal.requests] == [request.text for request in fixed.requests]


@pytest.mark.parametrize(
    ("distribution", "clipped_mean", "median"),
    # Means of the clipped distributions by numerical integration; medians are exp(mu).
    [(MIXED_INPUT, 63.83, 64 * np.exp(-(0.8**2) / 2)), (MIXED_OUTPUT, 47.18, 48 * np.exp(-(1.0**2) / 2))],
)
def test_lengths_follow_the_stated_lognormal(distribution, clipped_mean: float, median: float) -> None:
    drawn = distribution.sample(np.random.default_rng(1), 200_000)
    assert drawn.min() == distribution.low
    assert drawn.max() == distribution.high
    assert drawn.mean() == pytest.approx(clipped_mean, rel=0.01)
    assert np.median(drawn) == pytest.approx(median, rel=0.02)


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


@pytest.mark.parametrize(("name", "lengths"), [("equal", (64, 48)), ("fixed:5,9", (5, 9))])
def test_fixed_lengths(name: str, lengths: tuple[int, int]) -> None:
    requests = make_workload(name, 3).requests
    assert [(request.input_tokens, request.stop_length) for request in requests] == [lengths] * 3


@pytest.mark.parametrize("name", ["nope", "fixed:5", "fixed:0,5", "fixed:5,0", "fixed:5,385", "fixed:a,b"])
def test_a_workload_that_is_none_is_refused_by_name(name: str) -> None:
    with pytest.raises(SlipstreamError, match=name):
        make_workload(name, 1)


def test_description_names_the_hash_and_the_totals() -> None:
    described = make_workload("fixed:5,9", 4, seed=7).describe()
    assert described["input_tokens"] == {"mean": 5.0, "min": 5, "max": 5, "total": 20}
    assert described["output_tokens"]["total"] == 36
    assert described["sha256"] == make_workload("fixed:5,9", 4, seed=7).sha256


def test_words_are_distinct() -> None:
    assert len(set(WORDS)) == len(WORDS)


@pytest.mark.skipif(not TOKENIZER.exists(), reason="the demo model is not in the cache")
def test_a_text_has_as_many_tokens_as_words_for_the_demo_model() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    for request in make_workload("mixed", 64).requests:
        assert len(tokenizer.encode(request.text).ids) == request.input_tokens
    assert all(len(tokenizer.encode(text).ids) == 1 for word in WORDS for text in (word, f" {word}"))
