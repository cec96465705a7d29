"""The engine around the scheduler: what it refuses, what a failed step costs, what it records."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from observed import ObservedEngine
from scripted import DOOR, Clock, ScriptedRunner, expected_output, make_config, make_prompt, make_request
from slipstream.engine.engine import Engine
from slipstream.engine.messages import RequestStats
from slipstream.engine.records import StepRecords
from slipstream.errors import InvalidRequest


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """The engine logs a failed step with its traceback; here they fail on purpose."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("policy", ["continuous", "lockstep", "iterative"])
def test_an_empty_prompt_and_an_id_in_use_are_refused(policy: str) -> None:
    observed = ObservedEngine(make_config(policy=policy), ScriptedRunner(10))
    refusal = observed.add(make_request(0, [], 5))
    assert isinstance(refusal, InvalidRequest)
    assert "no tokens" in str(refusal)
    assert observed.add(make_request(1, 5, 5)) is None
    with pytest.raises(InvalidRequest, match="request 1 is still running"):
        observed.engine.add(make_request(1, 3, 5))
    assert observed.engine.requests[(DOOR, 1)].num_prompt_tokens == 5


@pytest.mark.parametrize("policy", ["lockstep", "iterative"])
def test_a_reservation_beyond_the_pool_is_refused_with_the_numbers(policy: str) -> None:
    observed = ObservedEngine(make_config(policy=policy), ScriptedRunner(3))
    refusal = observed.add(make_request(0, 20, 5))
    assert str(refusal) == "the request needs 25 tokens of KV cache at once; the whole pool has 24"


@pytest.mark.parametrize("policy", ["continuous", "lockstep", "iterative"])
def test_after_a_failed_step_nothing_of_its_requests_is_left(policy: str) -> None:
    """ENG-15: the requests of the step end with the reason; the next request's answer is the golden one."""
    observed = ObservedEngine(make_config(policy=policy), ScriptedRunner(20, failing_steps={0}))
    for number in range(3):
        observed.add(make_request(number, 9, 6, ignore_eos=True))
    changed = observed.step()
    assert [request.error for request in changed] == [
        "the step that computed it failed: StepFailed: scripted failure of step 0"
    ] * 3
    assert set(observed.reasons.values()) == {"error"}
    assert not observed.engine.has_work
    good = make_request(7, 9, 1, ignore_eos=True)
    observed.add(good)
    observed.step()
    assert observed.delivered[good.key] == expected_output(make_prompt(9, 7), good.sampling)[0]
    observed.check_end()


def test_a_failed_step_spares_those_who_were_not_in_it() -> None:
    observed = ObservedEngine(make_config(max_num_seqs=1), ScriptedRunner(20, failing_steps={1}))
    observed.add(make_request(0, 9, 6, ignore_eos=True))
    observed.add(make_request(1, 9, 6, ignore_eos=True))
    observed.run()
    assert observed.reasons == {(DOOR, 0): "error", (DOOR, 1): "length"}
    assert len(observed.delivered[(DOOR, 0)]) == 1
    observed.check_end()


def test_what_ends_beside_a_failed_step_is_known_no_more() -> None:
    """Its deadline had passed when the step that failed was scheduled: another abort of it must find nothing."""
    observed = ObservedEngine(make_config(max_num_seqs=2), ScriptedRunner(20, failing_steps={1}))
    late = make_request(1, 9, 6, ignore_eos=True)
    observed.add(make_request(0, 9, 6, ignore_eos=True))
    observed.add(late)
    observed.step()
    late.deadline = 0.0
    observed.step()
    assert observed.reasons == {(DOOR, 0): "error", (DOOR, 1): "timeout"}
    observed.cancel(1)
    observed.check_end()


def test_broken_logits_end_one_request_and_count_as_no_token() -> None:
    """SAM-02: the neighbour in the batch goes on."""
    observed = ObservedEngine(make_config(), ScriptedRunner(20, not_finite={((DOOR, 0), 2)}))
    observed.add(make_request(0, 9, 6, ignore_eos=True))
    observed.add(make_request(1, 9, 6, ignore_eos=True))
    observed.run()
    assert observed.reasons == {(DOOR, 0): "error", (DOOR, 1): "length"}
    assert {key[1]: len(ids) for key, ids in observed.delivered.items()} == {0: 2, 1: 6}
    assert observed.engine.stats().generation_tokens == 8
    observed.check_end()


def test_records_tell_prompt_rows_from_answer_rows() -> None:
    observed = ObservedEngine(make_config(max_num_seqs=4), ScriptedRunner(20, token_budget=8))
    observed.add(make_request(0, 5, 3, ignore_eos=True))
    observed.step()
    observed.add(make_request(1, 11, 2, ignore_eos=True))
    observed.run()
    columns = ("prefill_rows", "decode_rows", "sampled_rows", "running", "kv_blocks_used", "kv_tokens_held")
    assert [tuple(record[name] for name in columns) for record in observed.records] == [
        (5, 0, 1, 1, 1, 5),
        (7, 1, 1, 2, 2, 13),
        (4, 1, 2, 2, 3, 18),
        (0, 1, 1, 1, 2, 12),
    ]
    observed.check_end()


def test_the_ring_of_records_holds_the_newest() -> None:
    observed = ObservedEngine(make_config(), ScriptedRunner(20))
    observed.add(make_request(0, 5, 9, ignore_eos=True))
    observed.run()
    assert [record["index"] for record in observed.engine.records.last(3)] == [6, 7, 8]
    assert observed.engine.records.last(0) == []
    assert len(observed.engine.records.last(1000)) == 9


def test_records_are_read_in_pages_from_a_step_on() -> None:
    records = StepRecords(capacity=6)
    observed = ObservedEngine(make_config(), ScriptedRunner(20))
    observed.engine.records = records
    observed.add(make_request(0, 5, 9, ignore_eos=True))
    observed.run()

    def indices(**message: int) -> list[int]:
        return [record["index"] for record in records.asked_for(message)]

    assert indices(since=4, count=3) == [4, 5, 6]
    assert indices(since=7, count=100) == [7, 8]
    assert indices(since=9) == []
    assert indices(since=0, count=2) == [3, 4], "the oldest of nine that six are kept of"
    assert indices(last=2) == [7, 8]
    assert StepRecords().asked_for({"since": 0}) == []


def test_the_peak_of_blocks_is_exact_and_starts_anew_with_each_reading() -> None:
    observed = ObservedEngine(make_config(), ScriptedRunner(20))
    engine = observed.engine
    engine.add(make_request(0, 30, 2, ignore_eos=True))
    engine.step()
    engine.step()
    assert engine.stats().kv_blocks_peak == 4
    assert engine.stats().kv_blocks_peak == 0
    engine.add(make_request(1, 3, 1))
    engine.step()
    assert engine.stats().kv_blocks_peak == 1


def test_a_requests_times_are_read_from_the_engines_clock() -> None:
    clock = Clock()
    engine = Engine(make_config(max_num_seqs=1), ScriptedRunner(20), clock)
    first, second = make_request(0, 3, 2, ignore_eos=True), make_request(1, 3, 2, ignore_eos=True)
    engine.add(first)
    engine.add(second)
    while engine.has_work:
        engine.step()
    for request in (first, second):
        stats = RequestStats.of(request)
        assert request.first_scheduled_time is not None
        assert stats.queue_s == request.first_scheduled_time - request.arrival_time
        assert stats.first_token_s is not None
        assert stats.queue_s < stats.first_token_s < stats.queue_s + stats.inference_s
    assert RequestStats.of(second).queue_s >= RequestStats.of(first).queue_s + RequestStats.of(first).inference_s
    assert second.waited.seats == 2


def test_a_request_that_was_never_scheduled_has_waited_all_its_time() -> None:
    request = make_request(0, 3, 2)
    request.finish("cancelled", now=5.0)
    stats = RequestStats.of(request)
    assert (stats.queue_s, stats.first_token_s, stats.inference_s) == (5.0, None, 0.0)
