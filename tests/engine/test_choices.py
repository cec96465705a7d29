"""Several answers to one prompt (n > 1): it is computed once, and from there on each is a request like any other."""

from __future__ import annotations

import pytest

from observed import ObservedEngine
from scripted import BLOCK_SIZE, DOOR, ScriptedRunner, expected_output, make_config, make_request
from slipstream.engine.request import FINISH_CANCELLED, FINISH_ERROR, FINISH_TIMEOUT
from slipstream.errors import Unavailable

# Two full blocks and a part of one.
PROMPT = 2 * BLOCK_SIZE + 4


def make_engine(num_blocks: int = 64, runner: ScriptedRunner | None = None, **fields: object) -> ObservedEngine:
    return ObservedEngine(make_config(**fields), runner or ScriptedRunner(num_blocks))


def prefill_rows(observed: ObservedEngine) -> list[int]:
    return [record["prefill_rows"] for record in observed.records]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("prompt", [1, BLOCK_SIZE, BLOCK_SIZE + 1, PROMPT])
def test_the_prompt_is_computed_once_and_its_full_blocks_are_shared(prompt: int, prefix_cache: bool) -> None:
    observed = make_engine(prefix_cache=prefix_cache)
    observed.add(make_request(0, prompt, 12, n=3, ignore_eos=True))
    observed.step()
    assert (observed.scheduler.num_running, observed.scheduler.num_waiting) == (1, 2)
    observed.step()
    assert observed.scheduler.num_running == 3
    # The logits of the prompt's last token are needed once more for each further choice.
    assert prefill_rows(observed) == [prompt, 2]
    shared = (prompt - 1) // BLOCK_SIZE
    tables = [observed.requests[(DOOR, number)].block_table for number in range(3)]
    assert len({tuple(table[:shared]) for table in tables}) == 1
    own = [block for table in tables for block in table[shared:]]
    assert len(set(own)) == len(own), "what a choice writes to is its own"
    assert observed.scheduler.pool.num_used == shared + len(own)
    observed.run()
    observed.check_end()


def test_each_choice_is_its_own_seeded_run_and_the_first_is_that_of_one_alone() -> None:
    observed = make_engine()
    observed.add(make_request(0, PROMPT, 20, n=4, seed=7))
    observed.run()
    observed.check_end()
    outputs = [tuple(observed.delivered[(DOOR, number)]) for number in range(4)]
    assert len(set(outputs)) == 4
    request = observed.requests[(DOOR, 0)]
    assert list(outputs[0]) == expected_output(request.token_ids[:PROMPT], request.sampling)[0]


def test_choices_under_preemption_all_complete_and_each_ends_once() -> None:
    """SCH-12: n = 32 in a pool that holds a few of them."""
    observed = make_engine(num_blocks=14, max_num_seqs=32)
    observed.add(make_request(0, PROMPT, 40, n=32, ignore_eos=True))
    observed.run()
    observed.check_end()
    assert sorted(number for _, number in observed.reasons) == list(range(32))
    assert observed.engine.stats().preemptions > 0


def test_others_are_served_while_the_first_choice_computes_a_long_prompt() -> None:
    observed = make_engine(runner=ScriptedRunner(64, token_budget=8), max_num_seqs=4)
    observed.add(make_request(0, 60, 4, n=3))
    observed.add(make_request(10, 2, 3, ignore_eos=True))
    for _ in range(7):
        observed.step()
    assert observed.reasons == {}
    assert len(observed.delivered[(DOOR, 10)]) == 0  # the long prompt has the budget to itself
    observed = make_engine(runner=ScriptedRunner(64, token_budget=8), max_num_seqs=4, long_prefill_token_threshold=4)
    observed.add(make_request(0, 60, 4, n=3))
    observed.add(make_request(10, 2, 3, ignore_eos=True))
    for _ in range(4):
        observed.step()
    assert (DOOR, 10) in observed.reasons, "further choices in the queue have held it up"
    observed.run()
    observed.check_end()


def test_further_choices_come_before_what_arrived_after_their_first() -> None:
    """SCH-18: equal in priority and arrival, they have an order of their own."""
    for order in ("fcfs", "priority", "fair"):
        observed = make_engine(max_num_seqs=2, queue_order=order)
        observed.add(make_request(0, PROMPT, 6, n=3, ignore_eos=True))
        observed.add(make_request(10, PROMPT, 6, ignore_eos=True))
        observed.add(make_request(20, PROMPT, 6, ignore_eos=True))
        observed.run()
        observed.check_end()
        ends = sorted(observed.requests.values(), key=lambda request: request.first_scheduled_time)
        # Number 10 takes the seat that is free while the prompt is computed.
        assert [request.key[1] for request in ends] == [0, 10, 1, 2, 20]


def test_a_first_choice_that_ends_at_once_leaves_the_others_to_themselves() -> None:
    observed = make_engine(prefix_cache=False)
    observed.add(make_request(0, PROMPT, 1, n=3))
    observed.run()
    observed.check_end()
    assert prefill_rows(observed) == [PROMPT, 2 * PROMPT]


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_all_choices_end_with_a_cancelled_request(steps: int) -> None:
    observed = make_engine(runner=ScriptedRunner(64, token_budget=8), max_num_seqs=8)
    observed.add(make_request(0, PROMPT, 30, n=3, ignore_eos=True))
    for _ in range(steps):
        observed.step()
    observed.cancel(0, 1, 2)
    assert list(observed.reasons.values()) == [FINISH_CANCELLED] * 3
    assert observed.scheduler.pool.num_used == 0
    assert (observed.scheduler.num_running, observed.scheduler.num_waiting) == (0, 0)


def test_a_request_cancelled_after_one_choice_has_finished_ends_the_others() -> None:
    """CAN-07."""
    seed = next(s for s in range(100) if len(set(map(len, outputs_of(s)))) > 1)
    observed = make_engine()
    observed.add(make_request(0, PROMPT, 30, n=3, seed=seed))
    while not observed.reasons:
        observed.step()
    finished = dict(observed.reasons)
    observed.cancel(0, 1, 2)
    assert finished.items() <= observed.reasons.items()
    assert sorted(observed.reasons.values()).count(FINISH_CANCELLED) == 3 - len(finished)
    observed.check_end()


def outputs_of(seed: int) -> list[list[int]]:
    request = make_request(0, PROMPT, 30, seed=seed)
    return [expected_output(request.token_ids, request.sampling, choice=choice)[0] for choice in range(3)]


def test_a_choice_with_broken_logits_fails_alone() -> None:
    observed = make_engine(runner=ScriptedRunner(64, not_finite=[((DOOR, 1), 2)]))
    observed.add(make_request(0, PROMPT, 8, n=3, ignore_eos=True))
    observed.run()
    assert [observed.reasons[(DOOR, number)] for number in range(3)] == ["length", FINISH_ERROR, "length"]


def test_choices_that_wait_for_seats_end_with_their_deadline_as_those_that_run() -> None:
    observed = make_engine(max_num_seqs=1)
    request = make_request(0, PROMPT, 100, n=3, ignore_eos=True)
    request.deadline = 0.05
    observed.add(request)
    observed.run()
    assert set(observed.reasons.values()) == {FINISH_TIMEOUT}
    assert [len(observed.delivered[(DOOR, number)]) for number in (1, 2)] == [0, 0]


def test_each_choice_counts_against_the_queues_bounds() -> None:
    observed = make_engine(max_num_seqs=1, max_queued_requests=3)
    assert observed.add(make_request(0, 4, 8, n=4)) is None
    assert isinstance(observed.add(make_request(10, 4, 8)), Unavailable)
    observed.cancel(3)
    assert observed.add(make_request(10, 4, 8)) is None
    observed = make_engine(max_num_seqs=1, max_queued_tokens=30)
    assert observed.add(make_request(0, 10, 8, n=2)) is None
    refusal = observed.add(make_request(10, 4, 8, n=3))
    assert str(refusal) == "the queue is full: 20 tokens wait, 12 more would exceed max_queued_tokens = 30"


def test_a_prompt_is_counted_once_whatever_n_is() -> None:
    observed = make_engine()
    observed.add(make_request(0, PROMPT, 8, n=3))
    observed.run()
    stats = observed.engine.stats()
    assert (stats.prompt_tokens, stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (PROMPT, PROMPT, 0)


def test_a_more_urgent_request_takes_what_choices_hold_together() -> None:
    """No single choice holds the prompt's blocks alone; all of them make room, the urgent one does not wait."""
    observed = make_engine(
        runner=ScriptedRunner(16, token_budget=256), queue_order="priority", max_num_seqs=8, prefix_cache=False
    )
    shared, urgent = make_request(0, 10 * BLOCK_SIZE, 24, n=3, ignore_eos=True), make_request(9, 10 * BLOCK_SIZE, 1)
    shared.priority = 1
    observed.add(shared)
    while observed.scheduler.num_running < 3:
        observed.step()
    observed.add(urgent)
    observed.step()
    assert urgent.key in observed.reasons
    observed.run()
    observed.check_end()
