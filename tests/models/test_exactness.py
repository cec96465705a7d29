"""Exact oracles of the default CPU path: a request's logits are the same bits however it was computed.

The reference is each prompt alone: one request in an empty engine, its prompt in one piece, its blocks in order.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.request import Request
from slipstream.engine.sampler import Logits
from slipstream.models import cpu_llama
from tiny_model import Answer, TinyEngine, assert_same_bits, make_prompts

MAX_TOKENS = 12
PROMPTS = make_prompts(10)


@pytest.fixture(scope="module")
def alone(tiny_llama: Path) -> list[Answer]:
    engine = TinyEngine(tiny_llama)
    return [engine.answer(prompt, max_tokens=MAX_TOKENS) for prompt in PROMPTS]


def run_together(folder: Path, **fields: object) -> dict[int, Answer]:
    """All prompts at once."""
    engine = TinyEngine(folder, **fields)
    for number, prompt in enumerate(PROMPTS):
        engine.start(number, prompt, max_tokens=MAX_TOKENS)
    return engine.run()


def assert_all_same_bits(answers: dict[int, Answer], reference: list[Answer]) -> None:
    for number, expected in enumerate(reference):
        assert_same_bits(answers[number], expected)


def test_the_reference_is_worth_comparing_with(alone: list[Answer]) -> None:
    """The answers differ from each other and are more than one token repeated."""
    assert len({tuple(answer.token_ids) for answer in alone}) == len(alone)
    assert all(len(set(answer.token_ids)) > 2 for answer in alone)
    assert all(torch.isfinite(row).all() for answer in alone for row in answer.logits)


@pytest.mark.parametrize(
    "storages",
    [
        {"weights": "fp32"},
        {"weights": "int8"},
        {"kv_cache_dtype": "fp32"},
        {"weights": "fp32", "kv_cache_dtype": "fp16"},
    ],
)
def test_other_storages_are_independent_of_the_batch_too(tiny_llama: Path, storages: dict[str, str]) -> None:
    engine = TinyEngine(tiny_llama, **storages)
    assert engine.runner.batch_invariant
    reference = [engine.answer(prompt, max_tokens=MAX_TOKENS) for prompt in PROMPTS]
    assert_all_same_bits(run_together(tiny_llama, max_num_batched_tokens=23, **storages), reference)


def test_keys_and_values_in_fp16_change_logits_by_their_rounding_alone(tiny_llama: Path) -> None:
    """11 bits: 2^-12 of each key and value, through two layers."""
    exact = TinyEngine(tiny_llama, kv_cache_dtype="fp32").answer(PROMPTS[1], max_tokens=1).logits[0]
    rounded = TinyEngine(tiny_llama, kv_cache_dtype="fp16").answer(PROMPTS[1], max_tokens=1).logits[0]
    assert 0 < (rounded - exact).norm() / exact.norm() < 2e-3


def test_batched_equals_alone(tiny_llama: Path, alone: list[Answer]) -> None:
    assert_all_same_bits(run_together(tiny_llama), alone)


def test_neighbours_that_come_and_go_change_nothing(tiny_llama: Path, alone: list[Answer]) -> None:
    engine = TinyEngine(tiny_llama, max_num_seqs=16)
    neighbours = make_prompts(40, longest=90)
    for step in range(40):
        if step % 4 == 0:
            engine.start(step // 4, PROMPTS[step // 4], max_tokens=MAX_TOKENS)
        engine.start(100 + step, neighbours[step], max_tokens=1 + step * 7 % 19)
        if step % 5 == 0:
            engine.engine.abort([(b"", 100 + step - 3)])
        engine.step()
    assert_all_same_bits(engine.run(), alone)


@pytest.mark.parametrize("budget", [1, 2, 7, 16, 33, 64])
def test_a_prompt_in_chunks_equals_the_whole(tiny_llama: Path, alone: list[Answer], budget: int) -> None:
    """Chunks of one token, around a block's size, and what a budget shared with running answers leaves."""
    answers = run_together(tiny_llama, max_num_batched_tokens=budget, max_num_seqs=min(budget, 16))
    assert_all_same_bits(answers, alone)


def test_preempted_equals_uninterrupted(tiny_llama: Path) -> None:
    """Answers that outgrow their forecast, in a pool that holds two of the four at their full length."""
    prompts = [prompt[:9] for prompt in PROMPTS[:4]]
    engine = TinyEngine(tiny_llama)
    reference = [engine.answer(prompt, max_tokens=60) for prompt in prompts]
    engine = TinyEngine(tiny_llama, num_blocks=9)
    for number, prompt in enumerate(prompts):
        engine.start(number, prompt, max_tokens=60)
    answers = engine.run()
    assert sum(answer.num_preemptions for answer in answers.values()) >= 2
    assert_all_same_bits(answers, reference)


@pytest.mark.parametrize("block_size", [16, 32])
def test_cached_equals_computed(tiny_llama: Path, alone: list[Answer], block_size: int) -> None:
    """All prompts again, all at once, and the next turn of one that knows its whole conversation."""
    engine = TinyEngine(tiny_llama, block_size=block_size)
    for number, prompt in enumerate(PROMPTS):
        engine.start(100 + number, prompt, max_tokens=MAX_TOKENS)
    engine.run()
    again = [engine.start(number, prompt, max_tokens=MAX_TOKENS) for number, prompt in enumerate(PROMPTS)]
    assert_all_same_bits(engine.run(), alone)
    expected = [(len(prompt) - 1) // block_size * block_size for prompt in PROMPTS]
    assert [request.num_cached for request in again] == expected
    assert sum(expected) > 100
    turn = PROMPTS[1] + alone[1].token_ids + PROMPTS[2]
    answer = engine.answer(turn, max_tokens=MAX_TOKENS)
    assert_same_bits(answer, TinyEngine(tiny_llama).answer(turn, max_tokens=MAX_TOKENS))
    assert engine.engine.stats().prefix_hit_tokens > sum(expected) + len(PROMPTS[1])


@pytest.mark.parametrize("policy", ["lockstep", "iterative"])
@pytest.mark.parametrize("seats", [3, 10])
def test_every_batcher_equals_the_continuous_one(
    tiny_llama: Path, alone: list[Answer], policy: str, seats: int
) -> None:
    """DYN-02: left padding is masked in the prompt and in every later token; prompts of 1 to 60 tokens in a batch."""
    assert_all_same_bits(run_together(tiny_llama, policy=policy, max_num_seqs=seats), alone)


@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("policy", ["continuous", "lockstep"])
def test_the_block_size_changes_nothing(tiny_llama: Path, alone: list[Answer], block_size: int, policy: str) -> None:
    assert_all_same_bits(run_together(tiny_llama, block_size=block_size, policy=policy), alone)


def test_the_order_of_the_blocks_changes_nothing(tiny_llama: Path, alone: list[Answer]) -> None:
    engine = TinyEngine(tiny_llama)
    random.Random(0).shuffle(engine.engine.scheduler.pool._empty)
    requests = [engine.start(number, prompt, max_tokens=MAX_TOKENS) for number, prompt in enumerate(PROMPTS)]
    engine.step()
    assert requests[1].block_table != sorted(requests[1].block_table)
    assert_all_same_bits(engine.run(), alone)


@pytest.mark.parametrize("threads", [2, 3])
def test_the_number_of_threads_changes_nothing(
    tiny_llama: Path, alone: list[Answer], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three on two cores: a thread waits for one that does not run."""
    monkeypatch.setattr(cpu_llama, "_SERIAL_PRODUCTS", 0)
    assert_all_same_bits(run_together(tiny_llama, threads=threads), alone)


@settings(max_examples=8)
@given(
    order=st.permutations(range(len(PROMPTS))),
    gaps=st.lists(st.integers(0, 6), min_size=len(PROMPTS), max_size=len(PROMPTS)),
    budget=st.integers(4, 70),
    num_blocks=st.integers(5, 20),
    seats=st.integers(1, 4),
)
def test_any_schedule_gives_the_same_bits(
    tiny_llama: Path, alone: list[Answer], order: list[int], gaps: list[int], budget: int, num_blocks: int, seats: int
) -> None:
    """Arrivals, chunks, preemptions and cached beginnings together, at random; every prompt comes twice."""
    engine = TinyEngine(tiny_llama, max_num_seqs=seats, max_num_batched_tokens=budget, num_blocks=num_blocks)
    for number, gap in zip(order, gaps, strict=True):
        engine.start(number, PROMPTS[number], max_tokens=MAX_TOKENS)
        engine.start(100 + number, PROMPTS[number], max_tokens=MAX_TOKENS)
        for _ in range(gap):
            if engine.engine.has_work:
                engine.step()
    answers = engine.run()
    assert_all_same_bits(answers, alone)
    assert_all_same_bits({number: answers[100 + number] for number in order}, alone)


# --- drawn tokens


def preempt(engine: TinyEngine, request: Request) -> None:
    """Take a sequence's blocks as the scheduler does when another needs them."""
    engine.engine.scheduler._preempt(request, {})  # type: ignore[attr-defined]


@pytest.mark.parametrize("moments", [(0,), (10,), (3, 4), (0, 5, 11)])
def test_a_seed_gives_the_same_tokens_through_preemptions(tiny_llama: Path, moments: tuple[int, ...]) -> None:
    """SCH-01: seed 42 at temperature 1, preempted before its first token, after ten, and more than once."""
    sampling = {"temperature": 1.0, "seed": 42, "max_tokens": 16}
    expected = TinyEngine(tiny_llama).answer(PROMPTS[1], **sampling)
    engine = TinyEngine(tiny_llama, max_num_batched_tokens=20)
    request = engine.start(0, PROMPTS[1], **sampling)
    for moment in moments:
        engine.step()
        while request.num_output_tokens < moment:
            engine.step()
        preempt(engine, request)
    answer = engine.run()[0]
    assert answer.num_preemptions == len(moments)
    assert_same_bits(answer, expected)
    assert len(set(answer.token_ids)) > 8


def test_a_seed_gives_the_same_tokens_beside_any_neighbours(tiny_llama: Path) -> None:
    """SAM-11: alone, and in a batch of eight with other seeds, in each of the batchers."""
    sampling = [{"temperature": 1.0, "seed": seed, "max_tokens": 10} for seed in range(8)]
    engine = TinyEngine(tiny_llama)
    alone = [engine.answer(PROMPTS[1], **fields) for fields in sampling]
    assert len({tuple(answer.token_ids) for answer in alone}) == 8
    for policy in ("continuous", "lockstep", "iterative"):
        engine = TinyEngine(tiny_llama, policy=policy)
        for number, fields in enumerate(sampling):
            engine.start(number, PROMPTS[1], **fields)
        assert_all_same_bits(engine.run(), alone)


def test_one_row_with_broken_logits_leaves_its_neighbours_their_bits(tiny_llama: Path) -> None:
    """SAM-02: through the real sampler, for a greedy and for a drawn request."""
    for temperature in (0.0, 1.0):
        sampling = {"temperature": temperature, "seed": 7, "max_tokens": 8}
        engine = TinyEngine(tiny_llama)
        expected = engine.answer(PROMPTS[2], **sampling)
        engine = TinyEngine(tiny_llama)
        engine.start(0, PROMPTS[2], **sampling)
        victim = engine.start(1, PROMPTS[3], **sampling)
        computed = engine.runner.logits

        def break_one(batch, computed=computed, victim=victim):  # type: ignore[no-untyped-def]
            logits = computed(batch)
            for row, chunk in zip(logits.values, batch.sampled, strict=True):
                if chunk.request is victim and victim.num_output_tokens == 3:
                    row[5] = torch.nan
            return Logits.of(logits.values)

        engine.runner.logits = break_one  # type: ignore[method-assign]
        answers = engine.run()
        assert (answers[1].finish_reason, len(answers[1].token_ids)) == ("error", 3)
        assert_same_bits(answers[0], expected)
