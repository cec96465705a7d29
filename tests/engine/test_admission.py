"""What the two admission policies let in. Block size 8; the numbers are worked out by hand."""

from __future__ import annotations

import pytest

from scripted import make_request
from slipstream.engine.admission import LengthHistory, NoEvict, Optimistic
from slipstream.engine.block_pool import BlockPool
from slipstream.engine.request import Request


def running(number: int, num_prompt_tokens: int, num_output_tokens: int, max_tokens: int, pool: BlockPool) -> Request:
    """A sequence that holds its blocks."""
    request = make_request(number, num_prompt_tokens, max_tokens)
    request.token_ids += [9] * num_output_tokens
    request.block_table = pool.allocate(pool.blocks_for(request.num_tokens))
    return request


def test_the_forecast_is_the_mean_of_the_lengths_that_went_further() -> None:
    history = LengthHistory()
    for length in (2, 4, 9, 11):
        history.record(length)
    assert [history.expected(n) for n in (0, 2, 4, 8, 9, 11)] == [6.5, 8.0, 10.0, 10.0, 11.0, None]


def test_the_history_forgets_what_is_older_than_its_window() -> None:
    history = LengthHistory(window=2)
    for length in (100, 4, 6):
        history.record(length)
    assert history.expected(0) == 5.0


def test_a_lone_request_is_admitted_whatever_the_forecast_says() -> None:
    pool = BlockPool(3, 8)
    admission = Optimistic(pool)
    for _ in range(10):
        admission.record(running(0, 1, 900, 1000, BlockPool(200, 8)))
    assert admission.admits(make_request(1, 16, 1000), [], [])


@pytest.mark.parametrize(("num_blocks", "admits"), [(3, False), (4, True)])
def test_without_a_history_each_sequence_is_expected_to_grow_by_one_block(num_blocks: int, admits: bool) -> None:
    pool = BlockPool(num_blocks, 8)
    one = running(0, 8, 0, 100, pool)
    assert Optimistic(pool).admits(make_request(1, 8, 100), [one], []) == admits


@pytest.mark.parametrize(("num_blocks", "admits"), [(5, False), (6, True)])
def test_the_peak_is_looked_for_at_the_moments_at_which_a_sequence_ends(num_blocks: int, admits: bool) -> None:
    """Lengths of 16 are usual: the running one (8 + 8 of 16) has 8 to go and the candidate 16.

    When the running one ends, both have grown by one block: 2 + 1 + 2 x 1 = 5 blocks of 8 tokens; with a prompt of 9
    tokens the candidate holds 2 from the start, 6 in all. Later the candidate alone holds fewer.
    """
    pool = BlockPool(num_blocks, 8)
    admission = Optimistic(pool)
    for _ in range(3):
        admission.record(running(9, 1, 16, 100, BlockPool(3, 8)))
    assert admission.admits(make_request(1, 9, 100), [running(0, 8, 8, 100, pool)], []) == admits


@pytest.mark.parametrize(("max_tokens", "admits"), [(2, True), (100, False)])
def test_nobody_is_expected_to_grow_beyond_max_tokens(max_tokens: int, admits: bool) -> None:
    pool = BlockPool(4, 8)
    one = running(0, 14, 1, max_tokens, pool)
    assert Optimistic(pool).admits(make_request(1, 7, max_tokens), [one], []) == admits


def test_blocks_that_are_not_free_are_not_promised() -> None:
    pool = BlockPool(4, 8)
    pool.allocate(3)
    assert not Optimistic(pool).admits(make_request(1, 8, 1), [], [])


@pytest.mark.parametrize(("max_tokens", "admits"), [(8, True), (9, False)])
def test_no_evict_admits_only_what_can_run_to_its_max_tokens(max_tokens: int, admits: bool) -> None:
    pool = BlockPool(5, 8)
    one = running(0, 8, 0, 16, pool)
    assert NoEvict(pool).admits(make_request(1, 8, max_tokens), [one], []) == admits
