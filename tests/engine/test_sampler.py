"""The sampler: exact cuts, honest distributions, and a row that depends on nothing but itself."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from scripted import make_request
from slipstream.engine import sampler
from slipstream.engine.request import NOT_FINITE, Request
from slipstream.engine.sampler import Logits, sample

VOCAB = 50


def logits_of(*rows: int) -> torch.Tensor:
    """A row of logits for each number, [len(rows), VOCAB]."""
    return torch.stack([_row(number) for number in rows])


@cache
def _row(number: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(number))


def at_index(number: int, index: int, **sampling: object) -> Request:
    """A request that is about to get output token `index`."""
    request = make_request(number, 3, 1000, **{"temperature": 1.0, **sampling})  # type: ignore[arg-type]
    request.token_ids += [0] * index
    return request


# --- greedy


def test_greedy_takes_the_highest_and_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0, 5.0], [0.0, -1.0, 3.0, -2.0]])
    assert sample(Logits.of(logits), [at_index(0, 0, temperature=0.0)] * 2) == [1, 2]


@pytest.mark.parametrize("temperature", [1e-5, 9e-6, 1e-40, 5e-324, 0.0, -0.0])
def test_a_tiny_temperature_gives_the_greedy_token(temperature: float) -> None:
    """SAM-01: fp16 logits around 11, the two highest one fp16 step apart."""
    logits = torch.full((1, VOCAB), 10.5)
    logits[0, 7], logits[0, 30] = 11.0, 11.0078125
    for seed in range(20):
        assert sample(Logits.of(logits), [at_index(0, seed, temperature=temperature, seed=seed)]) == [30]


@pytest.mark.parametrize("temperature", [1e4, 1e30, 1e300])
def test_a_huge_temperature_draws_evenly(temperature: float) -> None:
    """SAM-15: and does not overflow."""
    drawn = sample(
        Logits.of(logits_of(1).repeat(500, 1)), [at_index(0, 0, temperature=temperature, seed=s) for s in range(500)]
    )
    assert len(set(drawn)) == VOCAB


# --- logits that are not finite


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, VOCAB // 2, VOCAB - 1, slice(None)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_end_their_own_row_only(bad: float, place: int | slice, temperature: float) -> None:
    """SAM-02: at any place, for greedy and drawn rows; the neighbours get what they get alone."""
    logits = logits_of(1, 2, 3)
    requests = [at_index(n, 4, temperature=t, seed=n) for n, t in enumerate((0.0, temperature, 1.0))]
    alone = [sample(Logits.of(logits[row : row + 1]), [requests[row]])[0] for row in (0, 2)]
    logits[1, place] = bad
    assert sample(Logits.of(logits), requests) == [alone[0], NOT_FINITE, alone[1]]


def test_a_logit_of_minus_infinity_is_a_token_that_is_never_drawn() -> None:
    logits = torch.zeros(1, 4)
    logits[0, 2] = -math.inf
    drawn = {sample(Logits.of(logits), [at_index(0, index, seed=5)])[0] for index in range(200)}
    assert drawn == {0, 1, 3}


# --- distribution


def chi_square_p(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """The probability of counts at least this far from the expected ones."""
    expected = probabilities * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    degrees = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, statistic / 2))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
@pytest.mark.parametrize("varied", ["seed", "index"])
def test_tokens_are_drawn_with_the_probabilities_of_the_softmax(temperature: float, varied: str) -> None:
    """Over seeds at one output index, and over output indices of one seed; the noise is fixed, so is the result."""
    count, vocab = 4000, 12
    logits = logits_of(3)[:, :vocab]
    if varied == "seed":
        requests = [at_index(0, 0, temperature=temperature, seed=seed) for seed in range(count)]
    else:
        requests = [at_index(0, index, temperature=temperature, seed=11) for index in range(count)]
    counts = torch.bincount(
        torch.tensor(sample(Logits.of(logits.repeat(count, 1)), requests)), minlength=vocab
    ).double()
    probabilities = torch.softmax(logits[0].double() / temperature, dim=-1)
    assert (probabilities * count).min() > 5
    assert chi_square_p(counts, probabilities) > 1e-3


def warped(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Probabilities [vocab] after transformers' warpers in the order of its `generate`."""
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    return torch.softmax(scores[0].double(), dim=-1)


@settings(max_examples=100)
@given(
    row=st.integers(0, 1000),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 7, VOCAB]),
    top_p=st.sampled_from([0.01, 0.3, 0.8, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_top_k_top_p_and_min_p_keep_what_transformers_keeps(
    row: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Each kept token is drawn by the numbers of its own share of [0, 1), and no other token by any."""
    logits = logits_of(row)
    expected = warped(logits, temperature, top_k, top_p, min_p)
    order = torch.argsort(expected, descending=True)[: int((expected > 0).sum())]
    ends = expected[order].cumsum(0)
    middles = torch.cat([ends - expected[order] / 2, torch.tensor([1 - 2.0**-53])])
    requests = [at_index(0, 0, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)] * len(middles)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "uniform", lambda *_: middles.numpy().astype(np.float64))
        drawn = sample(Logits.of(logits.repeat(len(middles), 1)), requests)
    assert drawn == [*order.tolist(), order[-1].item()]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
def test_top_p_zero_keeps_the_most_likely_token_alone(temperature: float) -> None:
    """SAM-06: zero is a value, not an absence."""
    logits = logits_of(4)
    best = int(logits.argmax())
    requests = [at_index(0, index, temperature=temperature, top_p=0.0) for index in range(50)]
    assert sample(Logits.of(logits.repeat(50, 1)), requests) == [best] * 50


def test_top_p_keeps_no_more_than_the_smallest_set_that_holds_it() -> None:
    """Four tokens of exactly a quarter each: two hold one half."""
    requests = [at_index(0, index, top_p=0.5, seed=3) for index in range(100)]
    assert set(sample(Logits.of(torch.zeros(100, 4)), requests)) == {0, 1}


def test_rows_of_one_batch_keep_their_own_parameters() -> None:
    """DYN-07: greedy, cut and plain rows side by side equal each alone."""
    parameters: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 0.5, "top_p": 0.4},
        {"temperature": 2.0, "top_k": 9, "top_p": 0.9},
        {"temperature": 1.0},
    ]
    for index in range(20):
        requests = [at_index(n, index, seed=n, **fields) for n, fields in enumerate(parameters)]
        logits = logits_of(*range(index, index + len(requests)))
        alone = [sample(Logits.of(logits[n : n + 1]), [request])[0] for n, request in enumerate(requests)]
        assert sample(Logits.of(logits), requests) == alone


# --- seeds


def tokens_with_seed(seed: int, neighbours: list[int], count: int = 12) -> list[int]:
    """Tokens of one request over `count` steps, beside neighbours that come and go."""
    tokens = []
    for index in range(count):
        beside = [at_index(n, index * n % 17, seed=n) for n in neighbours if (index + n) % 3 or len(neighbours) < 3]
        requests = [*beside[: len(beside) // 2], at_index(99, index, seed=seed), *beside[len(beside) // 2 :]]
        logits = logits_of(*range(1000, 1000 + len(beside) // 2), index, *range(2000, 2008))
        tokens.append(sample(Logits.of(logits[: len(requests)]), requests)[len(beside) // 2])
    return tokens


def test_a_seed_gives_the_same_tokens_in_any_batch() -> None:
    """SAM-11: alone, among seven others, and while they come and go. Zero is a seed; the whole 64 bits count."""
    seeds = (0, 1, 42, 1 << 32, 2**64 - 1)
    alone = [tokens_with_seed(seed, []) for seed in seeds]
    for seed, tokens in zip(seeds, alone, strict=True):
        assert tokens_with_seed(seed, [5, 6]) == tokens
        assert tokens_with_seed(seed, [1, 2, 3, 4, 5, 6, 7]) == tokens
    assert len({tuple(tokens) for tokens in alone}) == len(seeds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_any_dtype_are_sampled_in_float32(dtype: torch.dtype) -> None:
    logits = logits_of(8).to(dtype)
    request = at_index(0, 5, seed=9)
    assert sample(Logits.of(logits), [request]) == sample(Logits.of(logits.float()), [request])


def test_no_rows_are_no_tokens() -> None:
    """A step whose chunks all end inside a prompt samples nothing."""
    assert sample(Logits.of(torch.empty(0, VOCAB)), []) == []
