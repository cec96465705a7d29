"""Named situations of the continuous scheduler, many of which have made other servers fail in public."""

from __future__ import annotations

import re

import pytest

from observed import ObservedEngine
from scripted import (
    BLOCK_SIZE,
    DOOR,
    EOS_TOKEN_IDS,
    ScriptedRunner,
    expected_output,
    make_config,
    make_prompt,
    make_request,
    next_token,
)
from slipstream.errors import InvalidRequest, Unavailable


def engine(num_blocks: int, *, token_budget: int = 64, max_model_len: int = 1024, **config: object) -> ObservedEngine:
    runner = ScriptedRunner(num_blocks, token_budget=token_budget, max_model_len=max_model_len)
    return ObservedEngine(make_config(**config), runner)


def endless(number: int, prompt: int, max_tokens: int):  # type: ignore[no-untyped-def]
    """A request that ends by its max_tokens only."""
    return make_request(number, prompt, max_tokens, ignore_eos=True, seed=number)


def chunks_of_last_step(observed: ObservedEngine) -> dict[int, int]:
    """Rows of each request in the step computed last."""
    return {chunk.request.key[1]: chunk.num_tokens for chunk in observed.runner.batches[-1].chunks}


# --- lengths and limits


def test_a_prompt_that_fills_the_context_is_refused_at_once() -> None:
    """LEN-01, LEN-02: no room for one token; a prompt one shorter gives exactly one token, in chunks of 16."""
    observed = engine(100, token_budget=16, max_model_len=64)
    for prompt, max_tokens in [(64, 1), (65, 1), (63, 10)]:
        refusal = observed.add(endless(0, prompt, max_tokens))
        assert isinstance(refusal, InvalidRequest)
        assert f"the prompt has {prompt} tokens and max_tokens is {max_tokens}" in str(refusal)
        assert "64 are allowed" in str(refusal)
        assert not observed.engine.has_work
    assert observed.add(endless(1, 63, 1)) is None
    observed.run(most_steps=4)
    assert observed.reasons == {(DOOR, 1): "length"}
    assert len(observed.delivered[(DOOR, 1)]) == 1
    observed.check_end()


@pytest.mark.parametrize("prompt", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE])
def test_a_prompt_takes_exactly_the_blocks_it_fills(prompt: int) -> None:
    """LEN-12: around the block's edges."""
    observed = engine(8)
    observed.add(endless(0, prompt, 1))
    observed.step()
    assert observed.records[-1]["kv_blocks_used"] == -(-prompt // BLOCK_SIZE)
    assert observed.records[-1]["kv_tokens_held"] == prompt
    observed.check_end()


def test_what_can_never_fit_into_the_pool_is_refused_with_the_numbers() -> None:
    observed = engine(2)
    refusal = observed.add(endless(0, 16, 4))
    assert isinstance(refusal, InvalidRequest)
    assert str(refusal) == "the request needs 17 tokens of KV cache at once; the whole pool has 16"
    assert observed.add(endless(1, 15, 1)) is None


def test_no_evict_refuses_what_could_outgrow_the_pool() -> None:
    observed = engine(2, admission="no_evict")
    assert isinstance(observed.add(endless(0, 8, 9)), InvalidRequest)
    assert observed.add(endless(1, 8, 8)) is None
    observed.run()
    observed.check_end()


def test_without_chunked_prefill_a_prompt_beyond_the_budget_is_refused() -> None:
    observed = engine(100, token_budget=16, chunked_prefill=False)
    refusal = observed.add(endless(0, 17, 1))
    assert isinstance(refusal, InvalidRequest)
    assert "at most max_num_batched_tokens = 16" in str(refusal)
    assert observed.add(endless(1, 16, 1)) is None


# --- the budget


def test_a_long_prompt_never_takes_the_whole_budget_from_running_answers() -> None:
    observed = engine(100, token_budget=10)
    observed.add(endless(0, 3, 20))
    observed.add(endless(1, 4, 20))
    observed.step()
    observed.add(endless(2, 40, 1))
    for rows in (8, 8, 8, 8, 8):
        observed.step()
        assert chunks_of_last_step(observed) == {0: 1, 1: 1, 2: rows}
    assert observed.reasons[(DOOR, 2)] == "length"


def test_a_prompt_in_chunks_keeps_those_behind_it_waiting_for_budget() -> None:
    observed = engine(100, token_budget=6)
    observed.add(endless(0, 5, 10))
    observed.add(endless(1, 1, 10))
    observed.step()
    assert chunks_of_last_step(observed) == {0: 5, 1: 1}
    observed.add(endless(2, 30, 1))
    observed.step()
    observed.add(endless(3, 2, 1))
    observed.step()
    assert chunks_of_last_step(observed) == {0: 1, 1: 1, 2: 4}
    assert observed.requests[(DOOR, 3)].waited.budget == 1


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_takes_it_whole() -> None:
    observed = engine(100, token_budget=10, chunked_prefill=False)
    observed.add(endless(0, 3, 4))
    observed.step()
    observed.add(endless(1, 10, 1))
    for _ in range(3):
        observed.step()
        assert chunks_of_last_step(observed) == {0: 1}
    observed.step()
    assert chunks_of_last_step(observed) == {1: 10}
    assert observed.requests[(DOOR, 1)].waited.budget == 3


def test_without_chunked_prefill_a_preempted_sequence_longer_than_the_budget_comes_back() -> None:
    """Its prompt fitted into one step, prompt and answer no longer do: it is computed again in chunks."""
    observed = engine(4, token_budget=8, chunked_prefill=False, max_num_seqs=4)
    for number in range(3):
        observed.add(endless(number, 1, 25))
    observed.run(most_steps=200)
    assert observed.engine.stats().preemptions > 0
    observed.check_end()


# --- admission


def test_admission_is_decided_anew_in_every_step() -> None:
    """SCH-23: four prompts, four seats; the last chunk of one coincides with the admission of the others."""
    observed = engine(100, token_budget=16, max_num_seqs=4)
    for number, prompt in enumerate((20, 3, 3, 3)):
        observed.add(endless(number, prompt, 5))
    observed.step()
    observed.step()
    assert (observed.scheduler.num_running, observed.scheduler.num_waiting) == (4, 0)
    assert chunks_of_last_step(observed) == {0: 4, 1: 3, 2: 3, 3: 3}


def test_a_seat_that_becomes_free_is_taken_in_the_next_step() -> None:
    observed = engine(100, max_num_seqs=2)
    for number, max_tokens in enumerate((1, 5, 5)):
        observed.add(endless(number, 3, max_tokens))
    observed.step()
    assert observed.requests[(DOOR, 2)].waited.seats == 1
    observed.step()
    assert chunks_of_last_step(observed) == {1: 1, 2: 3}


def test_the_queue_is_bounded_by_requests() -> None:
    """TRI-09: beyond the bound requests are refused as unavailable, at once; the accepted ones finish.

    Those that are about to take one of the two free seats do not count.
    """
    observed = engine(100, max_num_seqs=2, max_queued_requests=50)
    refusals = [observed.add(endless(number, 3, 2)) for number in range(1000)]
    assert [refusal is None for refusal in refusals] == [True] * 52 + [False] * 948
    assert all(isinstance(refusal, Unavailable) for refusal in refusals[52:])
    assert str(refusals[52]) == "the queue is full: 50 requests wait, max_queued_requests allows no more"
    observed.run()
    assert len(observed.reasons) == 52
    observed.check_end()


def test_the_queue_is_bounded_by_tokens_but_takes_any_single_request() -> None:
    observed = engine(100, max_queued_tokens=20)
    assert observed.add(endless(0, 30, 2)) is None
    refusal = observed.add(endless(1, 1, 2))
    assert isinstance(refusal, Unavailable)
    assert "30 tokens wait, 1 more would exceed max_queued_tokens = 20" in str(refusal)
    observed.step()
    assert observed.add(endless(2, 20, 2)) is None
    assert isinstance(observed.add(endless(3, 1, 2)), Unavailable)
    observed.cancel(2)
    assert observed.add(endless(4, 20, 2)) is None


def test_admission_learns_from_the_lengths_of_finished_answers() -> None:
    """Eight prompts of one block in a pool of 16: eight start if little growth is expected, two once 40 tokens are."""
    for answers_before, admitted in ((0, 8), (1, 2)):
        observed = engine(16, max_num_seqs=8)
        for number in range(answers_before):
            observed.add(endless(100 + number, 8, 40))
            observed.run()
        for number in range(8):
            observed.add(endless(number, 8, 80))
        observed.step()
        assert observed.scheduler.num_running == admitted
        assert observed.scheduler.num_waiting == 8 - admitted
        observed.run()
        observed.check_end()


# --- preemption


def three_full_sequences() -> ObservedEngine:
    """Three sequences that hold two full blocks each, in a pool of six: the next step needs three more."""
    observed = engine(6, max_num_seqs=4)
    for number in range(3):
        observed.add(endless(number, 6, 13))
    for _ in range(11):
        observed.step()
    assert [request.num_computed for request in observed.scheduler.running] == [16, 16, 16]
    assert observed.engine.stats().preemptions == 0
    return observed


def test_no_more_is_preempted_than_the_missing_blocks_need() -> None:
    """SCH-14: the two blocks of the newest serve the other two."""
    observed = three_full_sequences()
    observed.step()
    assert observed.engine.stats().preemptions == 1
    assert [request.key[1] for request in observed.scheduler.running] == [0, 1]
    assert chunks_of_last_step(observed) == {0: 1, 1: 1}


def test_a_preempted_request_emits_nothing_in_that_step_and_holds_nothing_after_it() -> None:
    """SCH-08, SCH-16: and nothing twice when it comes back."""
    observed = three_full_sequences()
    victim = observed.requests[(DOOR, 2)]
    delivered = list(observed.delivered[victim.key])
    changed = observed.step()
    assert victim not in changed
    assert observed.delivered[victim.key] == delivered
    assert (victim.block_table, victim.num_computed) == ([], 0)
    observed.run()
    assert observed.delivered[victim.key] == expected_output(make_prompt(6, 2), victim.sampling)[0]
    observed.check_end()


def test_a_preempted_request_goes_before_those_that_never_started() -> None:
    """SCH-20: and nothing is admitted in the step that preempted."""
    observed = three_full_sequences()
    observed.add(endless(3, 1, 2))
    observed.step()
    assert [request.key[1] for request in observed.scheduler.waiting] == [2, 3]
    assert observed.requests[(DOOR, 3)].waited.blocks == 1
    observed.run()
    assert observed.requests[(DOOR, 2)].num_preemptions == 1
    observed.check_end()


def test_prompt_tokens_count_once_and_computed_tokens_as_often_as_they_were_computed() -> None:
    """MET-05: a preempted prompt is prefilled twice."""
    observed = three_full_sequences()
    observed.run()
    stats = observed.engine.stats()
    assert stats.prompt_tokens == 18
    assert stats.generation_tokens == 39
    # Every token but a sequence's last is computed once, and the 16 that the victim lost a second time.
    assert stats.computed_tokens == 18 + 39 - 3 + 16
    assert stats.useful_tokens == 18 + 39 - 3
    assert sum(record["recomputed_rows"] for record in observed.records) == 16
    observed.check_end()


def test_a_lone_sequence_that_outgrows_the_pool_ends_with_length_and_keeps_its_tokens() -> None:
    """ENG-05: nothing to preempt. The server lives, and who waited is served in the next step."""
    observed = engine(2, max_num_seqs=1)
    observed.add(endless(0, 10, 100))
    observed.add(endless(1, 3, 2))
    observed.run(most_steps=20)
    assert observed.reasons == {(DOOR, 0): "length", (DOOR, 1): "length"}
    assert len(observed.delivered[(DOOR, 0)]) == 16 - 10 + 1  # the last token's keys are never stored
    assert len(observed.delivered[(DOOR, 1)]) == 2
    observed.check_end()


def test_whatever_waits_while_nothing_runs_is_admitted_in_the_next_step() -> None:
    """SCH-05: the head of the queue fits, or was refused when it came; the whole pool is its to take."""
    observed = engine(3)
    for number in range(6):
        observed.add(endless(number, 23, 9))
        observed.add(endless(10 + number, 1, 24))
    while observed.engine.has_work:
        had_running = observed.scheduler.num_running > 0
        observed.step()
        assert had_running or observed.runner.batches[-1].chunks
    observed.check_end()


# --- cancellation


def test_a_cancel_before_and_after_the_step_that_ends_the_prefill() -> None:
    """CAN-05: the engine takes cancels between steps; no token after it, counted as cancelled once."""
    for steps_before, tokens in ((1, 0), (2, 1)):
        observed = engine(10, token_budget=8, max_num_seqs=4)
        observed.add(endless(0, 12, 5))
        for _ in range(steps_before):
            observed.step()
        observed.cancel(0)
        assert len(observed.delivered[(DOOR, 0)]) == tokens
        assert not observed.engine.has_work
        assert observed.engine.stats().finished == {"cancelled": 1}
        observed.check_end()


def test_a_cancel_on_either_side_of_the_last_step_leaves_one_terminal_state() -> None:
    """CAN-06: cancelled before it, or ended by length before the cancel came."""
    for steps, reason in ((2, "cancelled"), (3, "length")):
        observed = engine(10)
        observed.add(endless(0, 12, 3))
        for _ in range(steps):
            observed.step()
        observed.cancel(0)
        observed.cancel(0)
        assert observed.reasons == {(DOOR, 0): reason}
        assert observed.engine.stats().finished == {reason: 1}
        observed.check_end()


@pytest.mark.parametrize("reason", ["cancelled", "timeout"])
def test_a_preempted_request_ends_in_the_queue_with_the_tokens_it_had(reason: str) -> None:
    observed = three_full_sequences()
    observed.step()
    victim = observed.requests[(DOOR, 2)]
    assert list(observed.scheduler.waiting) == [victim]
    had = list(observed.delivered[victim.key])
    assert had
    if reason == "cancelled":
        observed.cancel(2)
    else:
        victim.deadline = 0.0
        assert victim in observed.step()
    assert (observed.reasons[victim.key], observed.delivered[victim.key]) == (reason, had)
    assert observed.scheduler.num_waiting == 0
    observed.run()
    observed.check_end()


@pytest.mark.parametrize("after_s", [0.0005, 0.0015])
def test_a_deadline_counts_where_it_is_over_when_the_step_begins(after_s: float) -> None:
    """On either side of the step that gives the last token: over before it, or only when it has come."""
    observed = engine(10)
    request = endless(0, 12, 2)
    observed.add(request)
    observed.step()
    # The clock moves by a millisecond when the step asks for the time.
    request.deadline = observed.engine._clock.now + after_s
    observed.step()
    in_time = after_s > 0.001
    assert observed.reasons == {request.key: "length" if in_time else "timeout"}
    assert len(observed.delivered[request.key]) == (2 if in_time else 1)
    observed.check_end()


def test_a_waiting_request_can_be_cancelled() -> None:
    observed = engine(10, max_num_seqs=1)
    observed.add(endless(0, 3, 3))
    observed.add(endless(1, 3, 3))
    observed.step()
    observed.cancel(1)
    observed.run()
    assert observed.reasons == {(DOOR, 0): "length", (DOOR, 1): "cancelled"}
    observed.check_end()


def test_an_id_can_be_used_again_once_its_request_has_ended() -> None:
    """VAL-03, VAL-04: cancel, then the same id at once; five hundred times."""
    observed = engine(10)
    for _ in range(500):
        observed.requests.clear(), observed.reasons.clear(), observed.delivered.clear()
        observed.add(endless(0, 3, 3))
        observed.step()
        observed.cancel(0)
    assert observed.scheduler.pool.num_used == 0
    assert observed.engine.stats().finished == {"cancelled": 500}


# --- soak


def test_two_thousand_mixed_requests_leave_no_block_behind() -> None:
    """SCH-07, MET-02: finished, stopped, cut, cancelled and failed; then nothing is held and the reasons add up."""
    runner = ScriptedRunner(
        40,
        token_budget=48,
        failing_steps=range(97, 100_000, 97),
        not_finite={((DOOR, number), number % 5) for number in range(0, 2000, 23)},
    )
    observed = ObservedEngine(make_config(max_num_seqs=16, max_queued_requests=4096), runner)
    engine = observed.engine
    for number in range(2000):
        engine.add(make_request(number, 1 + number % 29, 1 + number % 17, seed=number, stop_length=number % 11))
        if number % 3 == 0:
            engine.step()
        if number % 13 == 0:
            engine.abort([(DOOR, number - 5)])
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert sum(stats.finished.values()) == 2000
    assert set(stats.finished) == {"stop", "length", "cancelled", "error"}
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert engine.requests == {}


def test_the_scripted_runner_can_end_by_eos() -> None:
    """Of the tests themselves: outputs are as various as a model's."""
    ends = [
        expected_output(make_prompt(5, number), make_request(number, 5, 60, seed=number).sampling)
        for number in range(50)
    ]
    assert {reason for _, reason in ends} == {"stop", "length"}
    assert all(output[-1] in EOS_TOKEN_IDS for output, reason in ends if reason == "stop")
    assert len({next_token(make_prompt(5, number), 0) for number in range(32)}) > 15


# --- deadlines


def hurried(number: int, prompt: int, max_tokens: int, timeout_s: float):  # type: ignore[no-untyped-def]
    request = endless(number, prompt, max_tokens)
    request.deadline = request.arrival_time + timeout_s
    return request


def test_a_request_that_runs_past_its_deadline_keeps_its_tokens() -> None:
    """Its seat and its blocks are free in the step after, and the one that waited for them starts."""
    observed = engine(10, max_num_seqs=1)
    late, next_one = hurried(0, 3, 500, timeout_s=0.1), endless(1, 3, 2)
    observed.add(late)
    observed.add(next_one)
    observed.run()
    assert observed.reasons == {late.key: "timeout", next_one.key: "length"}
    assert 0 < len(observed.delivered[late.key]) < 100
    assert late.deadline < late.finish_time < late.deadline + 0.02
    observed.check_end()


def test_a_request_still_in_the_queue_at_its_deadline_gets_an_error() -> None:
    observed = engine(10, max_num_seqs=1)
    observed.add(endless(0, 3, 40))
    waiting = hurried(1, 3, 2, timeout_s=0.05)
    observed.add(waiting)
    observed.run()
    assert (waiting.finish_reason, waiting.error_kind) == ("error", "unavailable")
    assert re.fullmatch(r"deadline: still in the queue after 0\.05\d s; 0\.05 s were allowed", str(waiting.error))
    assert observed.reasons[(DOOR, 0)] == "length"
    observed.check_end()


def test_a_deadline_in_the_middle_of_a_long_prompt_or_after_a_preemption_is_a_timeout() -> None:
    observed = engine(100, token_budget=8, max_num_seqs=4)
    prompt = hurried(0, 400, 2, timeout_s=0.03)
    observed.add(prompt)
    observed.run()
    assert (observed.reasons[prompt.key], observed.delivered[prompt.key]) == ("timeout", [])
    preempted = hurried(1, 3, 100, timeout_s=0.5)
    observed.add(preempted)
    for _ in range(5):
        observed.step()
    observed.scheduler._preempt(preempted, {})
    preempted.deadline = 0.0
    observed.step()
    assert (observed.reasons[preempted.key], len(observed.delivered[preempted.key])) == ("timeout", 5)
    observed.check_end()


def test_a_deadlock_costs_the_request_it_is_stuck_at_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SCH-05: the watchdog, over a scheduler with a fault put there on purpose: it never admits request 0."""
    observed = ObservedEngine(make_config(), ScriptedRunner(8))
    admits = observed.scheduler._admission.admits
    monkeypatch.setattr(
        observed.scheduler._admission, "admits", lambda request, *rest: request.key[1] > 0 and admits(request, *rest)
    )
    for number in range(3):
        observed.add(make_request(number, 9, 4, ignore_eos=True))
    observed.run(most_steps=120)
    observed.check_end()
    assert observed.reasons == {(DOOR, 0): "error", (DOOR, 1): "length", (DOOR, 2): "length"}
    assert "no progress in 100 steps" in str(observed.requests[(DOOR, 0)].error)
    assert "running: none; waiting: 0 (0/9 tokens, 0 blocks), 1 (0/9 tokens, 0 blocks)" in caplog.text
    assert "8 of 8 blocks are free" in caplog.text
