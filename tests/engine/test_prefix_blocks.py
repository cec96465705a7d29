"""The prefix cache: what is found, what is kept, and nothing else. The scripted runner reads every slot back."""

from __future__ import annotations

import logging

import pytest

from observed import ObservedEngine
from scripted import BLOCK_SIZE, DOOR, ScriptedRunner, make_config, make_prompt, make_request, output_of
from slipstream.engine.request import Request

PROMPT = make_prompt(3 * BLOCK_SIZE + 3)


def engine(num_blocks: int = 100, *, runner: ScriptedRunner | None = None, **config: object) -> ObservedEngine:
    return ObservedEngine(make_config(**config), runner or ScriptedRunner(num_blocks, token_budget=200))


def answer(observed: ObservedEngine, number: int, prompt: list[int], max_tokens: int = 1, salt: str = "") -> Request:
    """One request that runs alone to its end."""
    request = start(observed, number, prompt, max_tokens, salt)
    observed.run()
    return request


def start(observed: ObservedEngine, number: int, prompt: list[int], max_tokens: int = 1, salt: str = "") -> Request:
    request = make_request(number, prompt, max_tokens, ignore_eos=True, seed=number)
    request.cache_salt = salt
    assert observed.add(request) is None
    return request


def rows(observed: ObservedEngine) -> list[int]:
    """How many tokens each step computed."""
    return [batch.num_tokens for batch in observed.runner.batches]


@pytest.mark.parametrize(
    ("length", "cached"),
    [
        (1, 0),
        (BLOCK_SIZE - 1, 0),
        (BLOCK_SIZE, 0),  # its last token must be computed
        (BLOCK_SIZE + 1, BLOCK_SIZE),
        (3 * BLOCK_SIZE, 2 * BLOCK_SIZE),
        (3 * BLOCK_SIZE + 1, 3 * BLOCK_SIZE),
    ],
)
def test_the_same_prompt_again_computes_only_what_follows_its_full_blocks(length: int, cached: int) -> None:
    """PFX-11: what is reported as cached is what no step computed, also where all of it had been given back."""
    observed = engine()
    prompt = make_prompt(length)
    first, second = answer(observed, 0, prompt), answer(observed, 1, prompt)
    assert (first.num_cached, second.num_cached) == (0, cached)
    assert rows(observed) == [length, length - cached]
    stats = observed.engine.stats()
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (2 * length, cached)
    observed.check_end()


def test_a_prompt_shares_as_much_as_is_equal_and_no_more() -> None:
    observed = engine()
    answer(observed, 0, PROMPT)
    for position, cached in ((0, 0), (BLOCK_SIZE, BLOCK_SIZE), (2 * BLOCK_SIZE - 1, BLOCK_SIZE)):
        other = list(PROMPT)
        other[position] += 1
        assert answer(observed, 1 + position, other).num_cached == cached
    # Equal blocks behind other beginnings are other blocks.
    moved = make_prompt(BLOCK_SIZE, 9) + PROMPT
    assert answer(observed, 100, moved).num_cached == 0
    observed.check_end()


def test_the_next_turn_of_a_conversation_finds_the_answer_too() -> None:
    observed = engine()
    first = answer(observed, 0, PROMPT, max_tokens=2 * BLOCK_SIZE)
    turn = first.token_ids + make_prompt(5)
    # The last token of an answer is never computed.
    assert answer(observed, 1, turn).num_cached == (first.num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    observed.check_end()


def test_only_requests_with_the_same_salt_share() -> None:
    """PFX-08: without one they share among themselves."""
    observed = engine()
    salts = ["", "a", "b", "a", "", "b"]
    cached = [answer(observed, number, PROMPT, salt=salt).num_cached for number, salt in enumerate(salts)]
    assert cached == [0, 0, 0, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE]
    observed.check_end()


def test_switched_off_nothing_is_kept() -> None:
    observed = engine(prefix_cache=False)
    assert [answer(observed, number, PROMPT).num_cached for number in range(2)] == [0, 0]
    assert observed.scheduler.pool.num_kept == 0
    assert observed.engine.stats().prefix_queried_tokens == 0


def test_requests_that_run_share_blocks_and_hold_each_token_once() -> None:
    observed = engine()
    first = start(observed, 0, PROMPT, max_tokens=20)
    observed.step()
    others = [start(observed, number, PROMPT, max_tokens=20) for number in (1, 2)]
    observed.step()
    assert [other.block_table[:3] for other in others] == [first.block_table[:3]] * 2
    assert len({first.block_table[3], *(other.block_table[3] for other in others)}) == 3
    assert observed.scheduler.pool.num_used == 3 + 3
    # Three full blocks once; beside them the first has 3 + 1 tokens and the others 3.
    assert observed.records[-1]["kv_tokens_held"] == 3 * BLOCK_SIZE + 4 + 3 + 3
    observed.cancel(0)
    observed.run()
    observed.check_end()


def test_what_was_used_longest_ago_goes_first_and_of_a_prompt_its_end() -> None:
    observed = engine(num_blocks=8)
    old, new = make_prompt(3 * BLOCK_SIZE + 1, 1), make_prompt(3 * BLOCK_SIZE + 1, 2)
    answer(observed, 0, old)
    answer(observed, 1, new)
    assert observed.scheduler.pool.num_kept == 6
    answer(observed, 2, old)  # now `new` is the older one
    answer(observed, 3, make_prompt(3 * BLOCK_SIZE, 3))  # needs three blocks, two are empty
    assert answer(observed, 4, old).num_cached == 3 * BLOCK_SIZE  # and needs a fourth
    assert answer(observed, 5, new).num_cached == BLOCK_SIZE
    observed.check_end()


def test_a_block_that_somebody_holds_is_never_handed_out() -> None:
    """The pool is full of what the running request shares; another has to wait."""
    observed = engine(num_blocks=5, max_num_seqs=2)
    answer(observed, 0, PROMPT)
    running = start(observed, 1, PROMPT, max_tokens=2 * BLOCK_SIZE - 3)
    observed.step()
    waiting = start(observed, 2, make_prompt(2 * BLOCK_SIZE, 7))
    observed.step()
    assert (running.num_cached, waiting.block_table, waiting.waited.blocks) == (3 * BLOCK_SIZE, [], 1)
    observed.run()
    observed.check_end()


def test_a_preempted_request_finds_its_own_blocks_and_is_counted_apart() -> None:
    observed = engine()
    request = start(observed, 0, PROMPT, max_tokens=30)
    for _ in range(10):
        observed.step()
    known = request.num_computed
    observed.scheduler._preempt(request, {})
    observed.step()
    assert rows(observed)[-1] == known + 1 - known // BLOCK_SIZE * BLOCK_SIZE
    stats = observed.engine.stats()
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (len(PROMPT), 0)
    assert (stats.readmission_queried_tokens, stats.readmission_hit_tokens) == (
        known + 1,
        known // BLOCK_SIZE * BLOCK_SIZE,
    )
    assert request.num_cached == 0
    observed.run()
    observed.check_end()


def test_a_prompt_that_was_cancelled_half_computed_leaves_its_blocks_to_the_next() -> None:
    runner = ScriptedRunner(100, token_budget=BLOCK_SIZE + 3)
    observed = engine(runner=runner, max_num_seqs=4)
    start(observed, 0, PROMPT)
    observed.step()
    observed.step()
    observed.cancel(0)
    assert answer(observed, 1, PROMPT).num_cached == 2 * BLOCK_SIZE
    observed.check_end()


@pytest.mark.parametrize("broken", ["step", "logits"])
def test_what_a_broken_step_has_written_is_not_offered(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    faults = {"failing_steps": [0]} if broken == "step" else {"not_finite": [((DOOR, 0), 0)]}
    observed = engine(runner=ScriptedRunner(100, token_budget=200, **faults))
    assert answer(observed, 0, PROMPT).finish_reason == "error"
    assert observed.scheduler.pool.num_kept == 0
    assert answer(observed, 1, PROMPT).num_cached == 0
    observed.check_end()


def test_two_that_compute_the_same_at_once_leave_one_copy() -> None:
    observed = engine()
    for number in range(2):
        start(observed, number, PROMPT, max_tokens=12)
    observed.run()
    assert rows(observed)[0] == 2 * len(PROMPT)
    third = answer(observed, 2, PROMPT)
    assert third.num_cached == 3 * BLOCK_SIZE
    assert len(output_of(third)) == 1
    observed.check_end()


def test_requests_that_share_are_admitted_together_where_copies_would_not_fit() -> None:
    """Ten blocks of beginning and one of its own each: sixteen share 26 blocks, apart they would need 176."""
    observed = engine(num_blocks=60, max_num_seqs=16)
    prompt = make_prompt(10 * BLOCK_SIZE + 1)
    answer(observed, 0, prompt)
    for number in range(1, 17):
        start(observed, number, prompt, max_tokens=6)
    observed.step()
    assert len(observed.scheduler.running) == 16
    assert observed.scheduler.pool.num_used == 10 + 16
    observed.run()
    assert observed.engine.stats().preemptions == 0
    observed.check_end()
