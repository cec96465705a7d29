"""Who is next: first come first served, by priority, and fair between tenants."""

from __future__ import annotations

from statistics import median

import pytest

from observed import ObservedEngine
from scripted import DOOR, ScriptedRunner, make_config, make_request
from slipstream.engine.queue_order import Fair, Fcfs, Priority
from slipstream.engine.request import Request
from slipstream.errors import ConfigError


def request(
    number: int, *, priority: int = 0, tenant: str = "", arrival: float = 0.0, prompt: int = 8, tokens: int = 8
) -> Request:
    made = make_request(number, prompt, tokens, ignore_eos=True, seed=number)
    made.priority, made.tenant, made.arrival_time = priority, tenant, arrival
    return made


def numbers(requests: object) -> list[int]:
    return [each.key[1] for each in requests]  # type: ignore[attr-defined]


def engine(**config: object) -> ObservedEngine:
    return ObservedEngine(make_config(**config), ScriptedRunner(64, token_budget=64))


# --- the orders themselves


def test_what_was_preempted_comes_back_to_its_place() -> None:
    for queue in (Fcfs(), Priority(30), Fair({})):
        requests = [request(number) for number in range(4)]
        for each in requests:
            queue.push(each)
        for each in requests[:2]:
            queue.remove(each)
        for each in requests[:2]:
            queue.push(each)
        assert numbers(queue) == [0, 1, 2, 3]
        assert len(queue) == 4
        assert requests[3] in queue
        queue.remove(requests[3])
        assert requests[3] not in queue


def test_the_lowest_priority_number_goes_first_and_age_counts() -> None:
    queue = Priority(aging_seconds=10)
    for number, (priority, arrival) in enumerate([(0, 0.0), (1, 0.0), (-1, 9.0), (-1, 11.0), (1, -30.0)]):
        queue.push(request(number, priority=priority, arrival=arrival))
    # One level is worth ten seconds: the last has waited for 30 s longer than the first, and is two levels behind it.
    assert numbers(queue) == [4, 2, 0, 3, 1]


def test_only_the_strictly_more_urgent_displace_and_none_that_has_outgrown_them() -> None:
    queue = Priority(aging_seconds=10)
    old, new, urgent = request(0, priority=1), request(1, priority=1), request(2, priority=0, arrival=9.0)
    late = request(3, priority=0, arrival=11.0)
    for each in (old, new, urgent, late):
        queue.push(each)
    assert queue.gives_way(old, urgent)
    assert not queue.gives_way(old, new)
    assert not queue.gives_way(urgent, old)
    assert not queue.gives_way(old, late), "it has waited for a whole level longer"
    assert queue.victim([old, urgent, new]) is new
    assert queue.victim([urgent, old]) is old


def test_the_tenant_with_the_fewest_tokens_for_its_weight_goes_first() -> None:
    queue = Fair({"a": 2.0})
    for number, tenant in enumerate("aabb"):
        queue.push(request(number, tenant=tenant))
    first = request(9, tenant="a")
    queue.charge(first, 100)  # 50 for its weight
    assert numbers(queue) == [2, 3, 0, 1]
    queue.charge(request(9, tenant="b"), 60)
    assert numbers(queue) == [0, 1, 2, 3]
    queue.charge(request(9, tenant="b"), -60)
    assert numbers(queue) == [2, 3, 0, 1]


def test_a_tenant_saves_nothing_up_while_it_is_away_and_a_new_one_is_not_behind() -> None:
    queue = Fair({})
    queue.push(request(0, tenant="heavy"))
    queue.charge(request(9, tenant="heavy"), 1000)
    queue.push(request(1, tenant="new"))
    queue.charge(request(9, tenant="new"), 1)
    assert numbers(queue) == [0, 1], "the new one starts where the others stand, not at nothing"
    queue.charge(request(9, tenant="heavy"), 2)
    assert numbers(queue) == [1, 0]
    for each in list(queue):
        queue.remove(each)
    queue.push(request(2, tenant="later"))
    assert queue._counters["later"] == queue._counters["heavy"], "the queue was empty: where the last one left it"


def test_tenants_without_number_are_forgotten_once_it_makes_no_difference() -> None:
    queue = Fair({})
    for number in range(20_000):
        each = request(number, tenant=f"tenant {number}")
        queue.push(each)
        queue.charge(each, 1)
        queue.remove(each)
    assert len(queue._counters) < 5000


# --- the scheduler with them


def test_an_urgent_request_takes_the_seat_of_the_newest_of_the_least_urgent() -> None:
    observed = engine(queue_order="priority", max_num_seqs=2)
    for number, priority in enumerate((0, 5)):
        observed.add(request(number, priority=priority, tokens=40))
    observed.step()
    observed.add(request(2, priority=1, tokens=4))
    observed.step()
    assert numbers(observed.scheduler.running) == [0, 2]
    assert observed.requests[(DOOR, 1)].num_preemptions == 1
    observed.run()
    observed.check_end()
    assert observed.requests[(DOOR, 0)].num_preemptions == 0


def test_a_victim_that_was_scheduled_already_leaves_the_step_with_its_tokens() -> None:
    """SCH-17: the less urgent one stands before the one that needs its blocks."""
    observed = ObservedEngine(make_config(queue_order="priority", max_num_seqs=2), ScriptedRunner(4, token_budget=8))
    for number, priority in enumerate((5, 0)):
        observed.add(request(number, priority=priority, prompt=4, tokens=40))
        observed.step()
    assert numbers(observed.scheduler.running) == [0, 1]
    for _ in range(40):
        observed.step()
        if observed.requests[(DOOR, 0)].num_preemptions:
            break
    assert numbers(observed.scheduler.running) == [1]
    assert [chunk.request.key[1] for chunk in observed.runner.batches[-1].chunks] == [1]
    observed.run()
    observed.check_end()


def test_many_of_one_priority_and_one_arrival_time_keep_their_order() -> None:
    """SCH-18."""
    observed = engine(queue_order="priority", max_num_seqs=3)
    for number in range(50):
        observed.add(request(number, priority=1, arrival=7.0, tokens=1))
    ended = []
    while observed.engine.has_work:
        ended += numbers(each for each in observed.step() if each.finished)
    assert ended == list(range(50))
    observed.check_end()


def test_an_urgent_request_has_its_first_token_in_the_next_step_though_all_seats_are_taken() -> None:
    """SCH-19."""
    observed = ObservedEngine(
        make_config(queue_order="priority", max_num_seqs=32), ScriptedRunner(256, token_budget=64)
    )
    for number in range(40):
        observed.add(request(number, priority=9, tokens=30))
    while len(observed.scheduler.running) < 32:
        observed.step()
    observed.add(request(99, priority=0, tokens=3))
    observed.step()
    assert len(observed.delivered[(DOOR, 99)]) == 1
    observed.run()
    observed.check_end()


def test_an_urgent_request_takes_blocks_but_not_in_vain() -> None:
    """Where even all that the less urgent hold would not do, they keep it."""
    observed = ObservedEngine(make_config(queue_order="priority", max_num_seqs=4), ScriptedRunner(8, token_budget=64))
    for number, priority in enumerate((0, 3)):
        observed.add(request(number, priority=priority, prompt=28, tokens=4))
    observed.step()
    observed.add(request(2, priority=1, prompt=40, tokens=2))
    observed.step()
    assert observed.requests[(DOOR, 1)].num_preemptions == 0
    observed.run()
    observed.check_end()


def test_one_that_fills_the_whole_pool_comes_back_after_it_had_to_give_way() -> None:
    observed = ObservedEngine(make_config(queue_order="priority", max_num_seqs=2), ScriptedRunner(1, token_budget=8))
    observed.add(make_request(0, 1, 16, ignore_eos=True))
    for _ in range(7):
        observed.step()
    urgent = make_request(1, 1, 1)
    urgent.priority = -1
    observed.add(urgent)
    observed.run(most_steps=4)
    observed.check_end()
    assert observed.reasons == {(DOOR, 1): "length", (DOOR, 0): "length"}


def test_nobody_starves_behind_urgent_requests_that_keep_coming() -> None:
    observed = engine(queue_order="priority", max_num_seqs=1, aging_seconds=1)
    clock = observed.engine._clock
    patient = request(0, priority=3, arrival=clock(), tokens=3)
    observed.add(request(1, priority=0, arrival=clock(), tokens=3))
    observed.add(patient)
    for number in range(2, 3000):
        if patient.finished:
            break
        observed.add(request(number, priority=0, arrival=clock(), tokens=3))
        for _ in range(3):
            observed.step()
    assert patient.finished
    assert clock() - patient.arrival_time < 3.5, "three levels are three seconds"
    assert patient.waited.priority > 0
    observed.run()
    observed.check_end()


def test_a_light_tenant_hardly_waits_behind_a_heavy_one() -> None:
    """One sends a hundred requests at once, another one every now and then."""
    waits: dict[str, list[float]] = {"heavy": [], "light": []}
    observed = engine(queue_order="fair", max_num_seqs=4)
    clock = observed.engine._clock
    for number in range(100):
        observed.add(request(number, tenant="heavy", arrival=clock(), tokens=20))
    number, step = 100, 0
    while any(each.tenant == "heavy" and not each.finished for each in observed.requests.values()):
        if step % 15 == 0:
            observed.add(request(number, tenant="light", arrival=clock(), tokens=20))
            number += 1
        observed.step()
        step += 1
    observed.run()
    observed.check_end()
    for each in observed.requests.values():
        assert each.first_scheduled_time is not None
        waits[each.tenant].append(each.first_scheduled_time - each.arrival_time)
    assert max(waits["light"]) <= median(waits["heavy"]) / 10


def test_tenants_that_always_have_work_get_tokens_by_their_weights() -> None:
    observed = engine(queue_order="fair", max_num_seqs=4, tenant_weights="gold=3, free=1")
    for number in range(400):
        observed.add(request(number, tenant=("gold", "free")[number % 2], tokens=8))
    tokens = {"gold": 0, "free": 0}
    for _ in range(300):
        observed.step()
        for chunk in observed.runner.batches[-1].chunks:
            tokens[chunk.request.tenant] += chunk.num_tokens
    assert tokens["gold"] / sum(tokens.values()) == pytest.approx(0.75, rel=0.05)


def test_some_may_pass_a_request_that_lacks_blocks_but_not_many() -> None:
    observed = ObservedEngine(
        make_config(look_past=2, max_num_seqs=8, admission="no_evict"), ScriptedRunner(8, token_budget=64)
    )
    observed.add(make_request(0, 8, 24, ignore_eos=True))  # four of eight blocks
    observed.add(make_request(1, 8, 40, ignore_eos=True))  # six
    for number in (2, 3, 4):
        observed.add(make_request(number, 4, 4, ignore_eos=True))  # one each
    observed.step()
    assert numbers(observed.scheduler.running) == [0, 2, 3]
    assert numbers(observed.scheduler.waiting) == [1, 4]
    assert observed.requests[(DOOR, 1)].num_passed == 2
    observed.run()
    observed.check_end()
    first, last = (observed.requests[(DOOR, number)].first_scheduled_time for number in (1, 4))
    assert first is not None
    assert last is not None
    assert first <= last


def test_a_long_prompt_takes_no_more_of_a_step_than_it_may() -> None:
    observed = engine(long_prefill_token_threshold=10)
    observed.add(make_request(0, 35, 1))
    observed.add(make_request(1, 35, 1))
    observed.step()
    assert [chunk.num_tokens for chunk in observed.runner.batches[-1].chunks] == [10, 10]
    observed.run()
    observed.check_end()


# --- the configuration


def test_tenant_weights_are_read_and_refused() -> None:
    assert make_config(tenant_weights="a=2, b=0.5,").weight_of_tenant == {"a": 2.0, "b": 0.5}
    for bad in ("a", "a=", "=1", "a=0", "a=nan", "a=-1", "a=x"):
        with pytest.raises(ConfigError, match="tenant_weights has"):
            make_config(tenant_weights=bad)
    with pytest.raises(ConfigError, match="queue_order is 'lifo'; allowed are fcfs, priority, fair"):
        make_config(queue_order="lifo")
