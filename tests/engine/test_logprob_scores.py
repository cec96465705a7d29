"""Log-probabilities of tokens, and a sampler that fails with one request alone."""

from __future__ import annotations

import logging

import pytest
import torch

from scripted import make_request
from slipstream.engine.logprobs import score
from slipstream.engine.request import MOST_LOGPROBS, SAMPLING_FAILED
from slipstream.engine.sampler import Logits, sample, sample_each

VOCAB = 50


def make_logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0)) * 3


def test_scores_are_the_log_softmax_of_the_raw_logits() -> None:
    logits = make_logits(3)
    for row, scores in enumerate(score(logits, [4, 5, 6], [0, 2, MOST_LOGPROBS])):
        expected = torch.log_softmax(logits[row], -1)
        order = expected.argsort(descending=True).tolist()
        wanted = (0, 2, MOST_LOGPROBS)[row]
        assert scores.ids == [4 + row, *order[:wanted]]
        assert scores.values == expected[scores.ids].tolist()
        assert scores.rank == order.index(4 + row) + 1


def test_a_rows_scores_do_not_depend_on_the_others() -> None:
    logits = torch.cat([make_logits(2), torch.zeros(1, VOCAB)])  # the last one is nothing but ties
    together = score(logits, [1, 2, 3], [5, 0, 20])
    alone = [score(logits[row : row + 1], [row + 1], [wanted])[0] for row, wanted in enumerate((5, 0, 20))]
    assert together == alone


def test_among_equals_the_lowest_id_comes_first() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0]])
    assert score(logits, [3], [3])[0].ids == [3, 1, 3, 2]
    assert score(logits, [3], [3])[0].rank == 1


def test_a_request_that_breaks_the_sampler_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    logits = make_logits(4)
    requests = [make_request(number, 3, 10, seed=number, temperature=0.8) for number in range(4)]
    expected = sample(Logits.of(logits), requests)
    # No door lets an id through that the vocabulary does not have.
    requests[2] = make_request(2, 3, 10, logit_bias={VOCAB: 1.0})
    with caplog.at_level(logging.ERROR):
        assert sample_each(Logits.of(logits), requests) == [*expected[:2], SAMPLING_FAILED, expected[3]]
    assert "no token could be chosen for request 2" in caplog.text
