"""Where other servers' prefix caches have gone wrong in public, each forced here on purpose.

Answers are compared with those of the same requests without a cache; the scripted runner reads every slot back, so a
block that holds another's keys fails in the step that reads it.
"""

from __future__ import annotations

import itertools
import logging
import random

import pytest

from observed import ObservedEngine
from scripted import (
    BLOCK_SIZE,
    DOOR,
    ScriptedRunner,
    expected_output,
    make_config,
    make_prompt,
    make_request,
    output_of,
)
from slipstream.engine.batch import Batch, Chunk
from slipstream.engine.messages import RequestStats
from slipstream.engine.request import Request


def engine(num_blocks: int, *, token_budget: int = 64, failing_steps: tuple[int, ...] = (), **config: object):  # type: ignore[no-untyped-def]
    runner = ScriptedRunner(num_blocks, token_budget=token_budget, failing_steps=failing_steps)
    return ObservedEngine(make_config(**config), runner)


def endless(number: int, prompt: int | list[int], max_tokens: int, seed: int | None = None) -> Request:
    """A request that ends by its max_tokens only."""
    return make_request(number, prompt, max_tokens, ignore_eos=True, seed=number if seed is None else seed)


def assert_only_full_cached_blocks_are_shared(observed: ObservedEngine) -> None:
    """Where two live tables hold one block, it is known to the cache, computed, and says the same in both."""
    running = observed.scheduler.running
    for first, second in itertools.combinations(running, 2):
        for block in set(first.block_table) & set(second.block_table):
            place = first.block_table.index(block)
            end = (place + 1) * BLOCK_SIZE
            assert block in observed.scheduler.cache._contents
            assert second.block_table.index(block) == place
            assert first.token_ids[:end] == second.token_ids[:end]
            assert min(first.num_computed, second.num_computed) >= end


def test_a_preempted_request_that_finds_its_own_blocks_computes_the_rest_and_no_more() -> None:
    """PFX-03: what is to be computed is derived after the lookup; what was found and what is computed are the whole."""
    observed = engine(8, max_num_seqs=2)
    for request in (endless(0, 6, 22), endless(1, 22, 30)):
        assert observed.add(request) is None
    victim = observed.requests[(DOOR, 1)]
    while not victim.num_preemptions:
        observed.step()
    assert observed.engine.stats().readmission_queried_tokens == 0
    while not victim.block_table:
        observed.step()
    stats = observed.engine.stats()
    computed = sum(chunk.num_tokens for chunk in observed.runner.batches[-1].chunks if chunk.request is victim)
    assert stats.readmission_hit_tokens >= BLOCK_SIZE
    # The step has added the token that it sampled.
    assert computed + stats.readmission_hit_tokens == stats.readmission_queried_tokens == victim.num_tokens - 1
    observed.run()
    assert victim.num_preemptions == 1
    assert output_of(victim) == expected_output(make_prompt(22, 1), victim.sampling)[0]
    observed.check_end()


@pytest.mark.parametrize(
    ("num_blocks", "cached"), [(4, [0, 0, 0, 0, 0, 0]), (5, [0, 0, 1, 1, 1, 1]), (8, [0, 0] + [3] * 4)]
)
def test_prompts_that_push_each_other_out_never_find_each_others_blocks(num_blocks: int, cached: list[int]) -> None:
    """PFX-04: X, Y, X, Y ... of one length, in a pool for one of them, for a part of the other, and for both."""
    prompts = [make_prompt(3 * BLOCK_SIZE + 1, number) for number in (1, 2)]
    answers = {}
    for prefix_cache in (True, False):
        observed = engine(num_blocks, prefix_cache=prefix_cache)
        requests = [endless(number, prompts[number % 2], 6, seed=number % 2) for number in range(6)]
        for request in requests:
            assert observed.add(request) is None
            observed.run()
        observed.check_end()
        answers[prefix_cache] = [output_of(request) for request in requests]
        found = [request.num_cached // BLOCK_SIZE for request in requests]
        assert found == (cached if prefix_cache else [0] * 6)
    assert answers[True] == answers[False]


class CollidingId(int):
    """A token id or a link with the hash of every other."""

    def __hash__(self) -> int:
        return 1


class CollidingSalt(str):
    """A salt with that hash, too."""

    __slots__ = ()

    def __hash__(self) -> int:
        return 1


class CollidingRunner(ScriptedRunner):
    """Its tokens collide like those of the prompts."""

    def _sample(self, chunk: Chunk) -> int:
        return CollidingId(super()._sample(chunk))


def test_with_one_hash_for_everything_each_request_finds_only_what_is_its_own() -> None:
    """PFX-06: the cache is a dictionary of (link, tokens): an equal hash leads to a comparison, never to a block.

    Links, tokens, prompts and answers all hash to one number here, so every lookup is decided by that comparison.
    """
    answers, found = {}, {}
    for prefix_cache in (True, False):
        observed = ObservedEngine(make_config(prefix_cache=prefix_cache), CollidingRunner(100))
        if prefix_cache:
            observed.scheduler.cache._numbers = map(CollidingId, itertools.count())
        requests = []
        for number, salt in itertools.product(range(4), ("", "a")):
            for prompt in 2 * [make_prompt(3 * BLOCK_SIZE + 1, number)]:
                request = endless(len(requests), [CollidingId(token_id) for token_id in prompt], 9, seed=number)
                request.cache_salt = CollidingSalt(salt)
                assert observed.add(request) is None
                observed.run()
                requests.append(request)
        observed.check_end()
        answers[prefix_cache] = [output_of(request) for request in requests]
        found[prefix_cache] = [request.num_cached for request in requests]
        if prefix_cache:
            known = observed.scheduler.cache._blocks
            # Eight beginnings of three blocks, and the one that the answer filled.
            assert (len(known), len({hash(contents) for contents in known})) == (8 * 4, 1)
    assert answers[True] == answers[False]
    assert found == {True: [0, 3 * BLOCK_SIZE] * 8, False: [0] * 16}


def preempt_at_random(observed: ObservedEngine, seed: int) -> None:
    """Now and then take the blocks of a sequence between two steps, or within the step that it was scheduled for."""
    chance = random.Random(seed)
    scheduler = observed.scheduler
    schedule, grow = scheduler.schedule, scheduler._grow

    def schedule_after_a_preemption(now: float) -> Batch:
        if len(scheduler.running) > 1 and chance.random() < 0.3:
            scheduler._preempt(chance.choice(scheduler.running[1:]), {})
        return schedule(now)

    def grow_after_a_preemption(request: Request, count: int, chunks: dict[Request, Chunk], now: float) -> bool:
        scheduled = [each for each in chunks if each is not scheduler.running[0]]
        if scheduled and chance.random() < 0.3:
            scheduler._preempt(chance.choice(scheduled), chunks)
        return grow(request, count, chunks, now)

    scheduler.schedule, scheduler._grow = schedule_after_a_preemption, grow_after_a_preemption


@pytest.mark.parametrize("seed", range(12))
def test_whoever_is_preempted_when_its_blocks_are_about_to_be_offered_offers_nothing_of_others(seed: int) -> None:
    """PFX-13, SCH-09: preempted at random, also in the very step that was to fill a block.

    What a sequence had taken in that step is the next one's; tables share nothing but full cached blocks.
    """
    answers, preemptions, hits = {}, 0, 0
    for prefix_cache in (True, False):
        observed = engine(16, token_budget=24, max_num_seqs=5, prefix_cache=prefix_cache)
        preempt_at_random(observed, seed)
        # Three families of prompts that begin alike.
        prompts = [make_prompt(10 + 5 * number % 17, number % 3) for number in range(12)]
        for number, prompt in enumerate(prompts):
            assert observed.add(endless(number, prompt, 25, seed=number % 3)) is None
        while observed.engine.has_work:
            observed.step()
            for request in observed.scheduler.waiting:
                assert (request.block_table, request.num_computed) == ([], 0)
            if prefix_cache:
                assert_only_full_cached_blocks_are_shared(observed)
        observed.check_end()
        answers[prefix_cache] = dict(observed.delivered)
        if prefix_cache:
            stats = observed.engine.stats()
            preemptions, hits = stats.preemptions, stats.readmission_hit_tokens
    assert answers[True] == answers[False]
    assert preemptions > 10
    assert hits > 0


@pytest.mark.parametrize("failing_step", [3, 4, 5])
def test_a_prefill_from_a_hit_that_fails_half_way_leaves_nothing_wrong_behind(
    failing_step: int, caplog: pytest.LogCaptureFixture
) -> None:
    """PFX-14: the request fails and lets go of what it shared; asked again, it gets the reference answer.

    Three steps compute the beginning. The next prompt starts from it and needs three more for the rest, of which one
    fails: what was computed before that one is found again, what that one has written is not.
    """
    caplog.set_level(logging.CRITICAL)
    beginning = make_prompt(2 * BLOCK_SIZE + 1)
    prompt = beginning + make_prompt(3 * BLOCK_SIZE - 1, 5)
    observed = engine(20, token_budget=BLOCK_SIZE, failing_steps=(failing_step,), max_num_seqs=1)
    failed, again = endless(1, prompt, 5, seed=7), endless(2, prompt, 5, seed=7)
    for request in (endless(0, beginning, 1), failed):
        assert observed.add(request) is None
        observed.run()
    assert (failed.num_cached, failed.finish_reason) == (2 * BLOCK_SIZE, "error")
    assert (failed.block_table, observed.scheduler.pool.num_used) == ([], 0)
    assert len(observed.runner.batches) == failing_step + 1
    assert observed.add(again) is None
    observed.run()
    assert again.num_cached == (2 + failing_step - 3) * BLOCK_SIZE
    assert output_of(again) == expected_output(prompt, again.sampling)[0]
    observed.check_end()


def test_a_preempted_request_that_finds_more_than_its_prompt_is_counted_apart() -> None:
    """ENG-06: cached tokens of a prompt never exceed it, so that no counter of what was computed can fall.

    What is asserted of every observed engine after each step (see `ObservedEngine`), where it is not far from wrong.
    """
    observed = engine(20)
    request = endless(0, BLOCK_SIZE + 1, 40)
    assert observed.add(request) is None
    while request.num_output_tokens < 30:
        observed.step()
    observed.scheduler._preempt(request, {})
    observed.run()
    stats = observed.engine.stats()
    assert stats.readmission_hit_tokens == 4 * BLOCK_SIZE > request.num_prompt_tokens
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens, request.num_cached) == (BLOCK_SIZE + 1, 0, 0)
    assert RequestStats.of(request).num_cached == 0
    observed.check_end()
