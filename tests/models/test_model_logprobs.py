"""Log-probabilities of the real path against transformers, and the same however they were computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.engine.request import Request
from tiny_model import TinyEngine, load_reference, make_prompts

PROMPT = make_prompts(3)[2][:33]
WANTED = {"logprobs": 3, "prompt_logprobs": 2, "max_tokens": 10}


def run(folder: Path, *, beside: int = 0, **fields: Any) -> Request:
    engine = TinyEngine(folder, **fields)
    for number in range(beside):
        engine.start(100 + number, make_prompts(beside, 90)[number], max_tokens=30)
    request = engine.start(0, PROMPT, **WANTED)
    engine.run()
    return request


@pytest.fixture(scope="module")
def alone(tiny_llama: Path) -> Request:
    return run(tiny_llama)


def test_logprobs_equal_those_of_transformers(tiny_llama: Path, alone: Request) -> None:
    with torch.inference_mode():
        logits = load_reference(tiny_llama)(torch.tensor([alone.token_ids])).logits[0].float()
    reference = torch.log_softmax(logits, -1)
    scored = [*alone.prompt_logprobs, *alone.logprobs]
    assert (len(alone.prompt_logprobs), len(alone.logprobs)) == (len(PROMPT) - 1, 10)
    for row, (token_id, scores) in enumerate(zip(alone.token_ids[1:], scored, strict=True)):
        assert scores.ids[0] == token_id
        # The reference has fp32 weights, the engine fp16 ones.
        assert torch.allclose(torch.tensor(scores.values), reference[row][scores.ids], atol=2e-2)
    assert all(scores.rank == 1 for scores in alone.logprobs), "greedy takes the likeliest"


@pytest.mark.parametrize("budget", [16, 17, 32, 33])
def test_a_prompt_in_chunks_has_the_scores_of_the_whole(tiny_llama: Path, alone: Request, budget: int) -> None:
    """CHK-02: also where the last chunk is one token, and where the prompt is a multiple of the chunk (one of 33)."""
    chunked = run(tiny_llama, max_num_batched_tokens=budget)
    assert chunked.prompt_logprobs == alone.prompt_logprobs
    assert chunked.logprobs == alone.logprobs


def test_neighbours_change_no_scores(tiny_llama: Path, alone: Request) -> None:
    together = run(tiny_llama, beside=5)
    assert (together.prompt_logprobs, together.logprobs) == (alone.prompt_logprobs, alone.logprobs)


@pytest.mark.parametrize("steps", [1, 3, 6])
def test_a_preempted_request_has_one_score_for_each_token(tiny_llama: Path, alone: Request, steps: int) -> None:
    """SCH-15: after a preemption in the prompt, and after some tokens of the answer."""
    engine = TinyEngine(tiny_llama, max_num_batched_tokens=16)
    request = engine.start(0, PROMPT, **WANTED)
    for _ in range(steps):
        engine.step()
    engine.engine.scheduler._preempt(request, {})
    engine.run()
    assert request.num_preemptions == 1
    assert (request.prompt_logprobs, request.logprobs) == (alone.prompt_logprobs, alone.logprobs)


def test_a_known_prompt_is_scored_whole(tiny_llama: Path, alone: Request) -> None:
    """PFX-09: who wants the prompt's scores computes it, whatever the cache knows."""
    engine = TinyEngine(tiny_llama)
    first = engine.start(0, PROMPT, **WANTED)
    engine.run()
    second = engine.start(1, PROMPT, **WANTED)
    engine.run()
    third = engine.start(2, PROMPT, max_tokens=10)
    engine.run()
    assert first.prompt_logprobs == second.prompt_logprobs == alone.prompt_logprobs
    assert (second.num_cached, third.num_cached) == (0, 32)


def test_choices_have_the_bits_of_a_request_alone(tiny_llama: Path) -> None:
    """Through copied blocks and shared ones: each choice's logits are those of its own tokens computed at once."""
    for prefix_cache in (True, False):
        engine = TinyEngine(tiny_llama, prefix_cache=prefix_cache)
        engine.start(0, PROMPT, n=3, temperature=1.0, seed=5, max_tokens=12)
        answers = engine.run()
        assert len({tuple(answer.token_ids) for answer in answers.values()}) == 3
        for answer in answers.values():
            for length in (0, 5, 11):
                alone = TinyEngine(tiny_llama).answer(PROMPT + answer.token_ids[:length], max_tokens=1)
                assert torch.equal(alone.logits[0], answer.logits[length])
