"""The block pool: every block is free or held by exactly one table, and misuse is noticed at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.block_pool import BlockPool


@given(st.integers(1, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=40))
def test_allocate_and_free_keep_every_block_in_one_place(num_blocks: int, operations: list[tuple[bool, int]]) -> None:
    pool = BlockPool(num_blocks, 8)
    tables: list[list[int]] = []
    for allocates, number in operations:
        if not allocates and tables:
            pool.free(tables.pop(number % len(tables)))
        elif allocates and number <= pool.num_free:
            free = pool.num_free
            tables.append(pool.allocate(number))
            assert pool.num_free == free - number
        pool.check(tables)
        assert pool.num_used == sum(map(len, tables))
        assert pool.num_used + pool.num_free == num_blocks


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_for_rounds_up(num_tokens: int, blocks: int) -> None:
    assert BlockPool(4, 16).blocks_for(num_tokens) == blocks


def test_asking_for_more_than_is_free_takes_nothing() -> None:
    pool = BlockPool(3, 8)
    pool.allocate(2)
    with pytest.raises(ValueError, match="2 blocks asked for, 1 free"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_a_block_freed_twice_is_refused() -> None:
    pool = BlockPool(3, 8)
    blocks = pool.allocate(2)
    pool.free(blocks)
    with pytest.raises(ValueError, match="freed twice"):
        pool.free(blocks[:1])


def test_blocks_freed_last_are_handed_out_first() -> None:
    pool = BlockPool(8, 8)
    pool.allocate(2)
    warm = pool.allocate(3)
    pool.free(warm)
    assert pool.allocate(3) == warm


def test_check_finds_a_shared_and_a_lost_block() -> None:
    pool = BlockPool(4, 8)
    table = pool.allocate(2)
    with pytest.raises(AssertionError, match="held twice"):
        pool.check([table, table[:1]])
    with pytest.raises(AssertionError, match="1 held \\+ 2 free blocks are not 4"):
        pool.check([table[:1]])
