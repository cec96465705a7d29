"""What a request does to its logits, against transformers' processors where one exists."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from observed import ObservedEngine
from scripted import ScriptedRunner, make_config, make_request, output_of
from slipstream.engine.logits import edit_logits
from slipstream.engine.request import NOTHING_ALLOWED, Request
from slipstream.engine.sampler import Logits, sample

VOCAB = 32
EOS = frozenset({3, 5})


def request_of(prompt: list[int], output: list[int], **sampling: object) -> Request:
    request = make_request(0, prompt, 100, **sampling)
    request.know_end_of_sequence(EOS)
    request.token_ids += output
    return request


def row_of(number: int) -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(number))


def edited(row: torch.Tensor, request: Request) -> torch.Tensor:
    return edit_logits(row, [request])


tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)


@given(st.integers(0, 99), tokens, st.lists(st.integers(0, VOCAB - 1), max_size=12), st.sampled_from([0.5, 1.1, 2.0]))
def test_repetition_penalty_is_that_of_transformers_over_prompt_and_output(
    row: int, prompt: list[int], output: list[int], penalty: float
) -> None:
    """SAM-08: repetition counts both."""
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), row_of(row))
    assert torch.equal(edited(row_of(row), request_of(prompt, output, repetition_penalty=penalty)), expected)


@given(st.integers(0, 99), tokens, st.lists(st.integers(0, VOCAB - 1), max_size=12))
def test_frequency_and_presence_count_the_output_alone(row: int, prompt: list[int], output: list[int]) -> None:
    """SAM-08: a prompt full of a token costs it nothing."""
    request = request_of(prompt, output, frequency_penalty=0.5, presence_penalty=-0.25)
    expected = row_of(row)
    for token_id in set(output):
        expected[0, token_id] -= 0.5 * output.count(token_id) - 0.25
    torch.testing.assert_close(edited(row_of(row), request), expected)


@given(st.integers(0, 99), tokens, st.lists(tokens.map(lambda ids: ids[:3]), min_size=1, max_size=4))
def test_bad_sequences_are_those_of_transformers(row: int, output: list[int], bad: list[list[int]]) -> None:
    request = request_of([1], output, bad_sequences=tuple(map(tuple, bad)))
    expected = NoBadWordsLogitsProcessor(bad, eos_token_id=None)(torch.tensor([output]), row_of(row))
    assert torch.equal(edited(row_of(row), request), expected)


def test_a_bad_sequence_that_the_prompt_has_begun_is_not_held_against_the_answer() -> None:
    request = request_of([7, 8], [], bad_sequences=((7, 8, 9),))
    assert torch.equal(edited(row_of(1), request), row_of(1))
    assert edited(row_of(1), request_of([7], [7, 8], bad_sequences=((7, 8, 9),)))[0, 9] == -torch.inf


@pytest.mark.parametrize("num_output", [0, 4, 5, 6])
def test_no_token_that_ends_comes_before_min_tokens(num_output: int) -> None:
    """STP-06: every end-of-sequence id and every stop token; as in transformers."""
    prompt, output = [1, 2], [6] * num_output
    request = request_of(prompt, output, min_tokens=5, stop_token_ids=(9,))
    processor = MinNewTokensLengthLogitsProcessor(len(prompt), 5, [3, 5, 9])
    assert torch.equal(edited(row_of(2), request), processor(torch.tensor([prompt + output]), row_of(2)))


def test_with_ignore_eos_only_the_stop_tokens_wait_for_min_tokens() -> None:
    """STP-06."""
    request = request_of([1], [], min_tokens=5, stop_token_ids=(9,), ignore_eos=True)
    assert torch.isinf(edited(row_of(2), request)[0]).nonzero().flatten().tolist() == [9]


def test_a_bias_is_added_and_only_allowed_tokens_remain() -> None:
    bias = {2: 1.5, 7: -100.0}
    expected = SequenceBiasLogitsProcessor([[[token_id], value] for token_id, value in bias.items()])
    request = request_of([1], [], logit_bias=bias)
    assert torch.equal(edited(row_of(3), request), expected(torch.tensor([[1]]), row_of(3)))
    kept = edited(row_of(3), request_of([1], [], allowed_token_ids=(2, 4, 4), logit_bias=bias))
    assert torch.isfinite(kept[0]).nonzero().flatten().tolist() == [2, 4]
    assert kept[0, 2] == row_of(3)[0, 2] + 1.5


def test_a_request_that_allows_no_token_fails_alone() -> None:
    """STP-08: an error, not token 0; the neighbour is as ever."""
    logits = torch.cat([row_of(4), row_of(5)])
    for fields in (
        {"min_tokens": 5, "allowed_token_ids": (3, 5)},
        {"allowed_token_ids": (1,), "bad_sequences": ((1,),)},
    ):
        for temperature in (0.0, 1.0):
            blocked = request_of([1], [], temperature=temperature, **fields)
            assert sample(Logits.of(logits), [blocked, request_of([1], [])]) == [
                NOTHING_ALLOWED,
                int(row_of(5).argmax()),
            ]
    blocked.append(NOTHING_ALLOWED, now=1.0)
    assert (blocked.finish_reason, blocked.error) == ("error", "the request's parameters allow no token at all")


FIELDS: list[dict[str, object]] = [
    {},
    {"repetition_penalty": 1.3},
    {"logit_bias": {3: 5.0}},
    {"temperature": 1.0, "frequency_penalty": 1.0, "presence_penalty": 0.5},
    {"min_tokens": 30, "stop_token_ids": tuple(range(0, 32, 2))},
    {"temperature": 0.7, "allowed_token_ids": (4, 9, 11), "top_k": 2},
    {"temperature": 1.0, "min_p": 0.3},
]


def test_each_row_of_a_batch_is_edited_by_its_own_request_alone() -> None:
    generator = random.Random(0)
    for _ in range(10):
        requests = [
            request_of([1, 2, 3], [generator.randrange(VOCAB) for _ in range(generator.randrange(9))], seed=n, **fields)
            for n, fields in enumerate(FIELDS)
        ]
        logits = torch.cat([row_of(generator.randrange(1000)) for _ in requests])
        before = logits.clone()
        alone = [sample(Logits.of(logits[row : row + 1]), [request])[0] for row, request in enumerate(requests)]
        assert sample(Logits.of(logits), requests) == alone
        assert torch.equal(logits, before), "the model's logits were changed"


class SamplingRunner(ScriptedRunner):
    """Draws from logits that depend on the last token and the position, through the real sampler."""

    def _sample(self, chunk) -> int:  # type: ignore[no-untyped-def]
        super()._sample(chunk)  # reads the whole context back
        row = torch.randn(1, 32, generator=torch.Generator().manual_seed(chunk.token_ids[-1] % 4))
        return sample(Logits.of(row), [chunk.request])[0]


@pytest.mark.parametrize("fields", FIELDS[1:], ids=str)
def test_a_preemption_or_a_prefix_hit_does_not_change_what_the_parameters_mean(fields: dict[str, object]) -> None:
    """SAM-07, SAM-09: prompt and output are told apart as before; without the parameters the answer is another."""

    def tokens_of(moments: tuple[int, ...], sampling: dict[str, object]) -> list[int]:
        observed = ObservedEngine(make_config(), SamplingRunner(40))
        request = make_request(0, 20, 30, ignore_eos=True, seed=4, **sampling)
        for moment in moments:
            observed.engine.add(make_request(1 + moment, 20, 1))
        observed.engine.add(request)
        for step in range(200):
            if step in moments and request in observed.scheduler.running:
                observed.scheduler._preempt(request, {})
            if request.finished:
                return output_of(request)
            observed.engine.step()
        raise AssertionError("the request does not end")

    undisturbed = tokens_of((), fields)
    assert len(undisturbed) == 30
    assert tokens_of((3, 9, 20), fields) == undisturbed
    assert tokens_of((), {"temperature": fields.get("temperature", 0.0)}) != undisturbed
