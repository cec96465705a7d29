"""Who holds blocks, and when: what runs, and nothing else; public failures of schedulers that forgot it."""

from __future__ import annotations

import pytest

from observed import ObservedEngine
from scripted import DOOR, ScriptedRunner, expected_output, make_config, make_prompt, make_request, output_of


def test_a_block_taken_in_the_step_of_a_preemption_is_forgotten_with_it() -> None:
    """SCH-09: the victim was scheduled in that step and had got a new block for it; it comes back without a trace."""
    observed = ObservedEngine(make_config(queue_order="priority", max_num_seqs=2), ScriptedRunner(5))
    victim, urgent = (make_request(number, 5 + number, 20, ignore_eos=True) for number in range(2))
    victim.priority = 1
    for request in (victim, urgent):
        assert observed.add(request) is None
        observed.step()
    while victim.num_computed < 16:
        observed.step()
    pool = observed.scheduler.pool
    assert [(len(each.block_table), each.num_computed) for each in (victim, urgent)] == [(2, 16), (2, 16)]
    allocated, allocate = [], pool.allocate
    pool.allocate = lambda count: allocated.append(allocate(count)) or allocated[-1]
    observed.step()
    assert [len(blocks) for blocks in allocated] == [1, 1], "both had got a block"
    assert (victim.num_preemptions, victim.block_table, victim.num_computed) == (1, [], 0)
    assert [chunk.request for chunk in observed.runner.batches[-1].chunks] == [urgent]
    assert (len(urgent.block_table), pool.num_free) == (3, 2)
    observed.run()
    assert output_of(victim) == expected_output(make_prompt(5, 0), victim.sampling)[0]
    observed.check_end()


@pytest.mark.parametrize("queue_order", ["fcfs", "priority", "fair"])
def test_whatever_waits_holds_no_block_so_nobody_waits_for_it(queue_order: str) -> None:
    """SCH-13: preempted ones, cached prompts and newcomers in one queue; all blocks are those of what runs.

    So where nothing runs the whole pool is there for the first in the queue, and each step brings something forward.
    """
    observed = ObservedEngine(
        make_config(queue_order=queue_order, max_num_seqs=4, look_past=2), ScriptedRunner(8, token_budget=24)
    )
    for number in range(16):
        request = make_request(number, make_prompt(5 + 7 * number % 23, number % 3), 20, ignore_eos=True, seed=number)
        request.priority, request.tenant = number % 4, f"tenant {number % 2}"
        assert observed.add(request) is None
    found_again = 0
    while observed.engine.has_work:
        observed.step()
        scheduler = observed.scheduler
        held = {block for request in scheduler.running for block in request.block_table}
        assert [request.block_table for request in scheduler.waiting] == [[]] * scheduler.num_waiting
        assert scheduler.pool.num_used == len(held)
        assert observed.runner.batches[-1].chunks
        found_again += sum(bool(scheduler.cache.find(request)) for request in scheduler.waiting)
    assert observed.engine.stats().preemptions > 0
    assert found_again > 10, "what the cache knows of those that wait belongs to nobody"
    assert set(observed.reasons) == {(DOOR, number) for number in range(16)}
    observed.check_end()
