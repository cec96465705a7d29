"""The block pool: every block is free or in as many tables as it has holders, and misuse is noticed at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.block_pool import BlockPool


@given(st.integers(1, 20), st.lists(st.tuples(st.sampled_from("afsk"), st.integers(0, 8)), max_size=60))
def test_no_operation_loses_a_block(num_blocks: int, operations: list[tuple[str, int]]) -> None:
    """Allocate, free, share with another table, and keep."""
    pool = BlockPool(num_blocks, 8)
    tables: list[list[int]] = []
    kept: set[int] = set()
    pool.on_evict = kept.remove
    for operation, number in operations:
        free, table = pool.num_free, tables[number % len(tables)] if tables else []
        if operation == "a" and number <= free:
            tables.append(pool.allocate(number))
            assert pool.num_free == free - number
        elif operation == "f" and tables:
            tables.remove(table)
            pool.free(table)
        elif operation == "s":
            blocks = [*table, *(block for block in kept if block not in table)][: number + 1]
            pool.share(blocks)
            tables.append(blocks)
        elif operation == "k" and table:
            pool.keep(table[-1])
            kept.add(table[-1])
        pool.check(tables)
        held = [block for table in tables for block in table]
        assert pool.num_used == len(set(held))
        assert pool.num_kept == len(kept - set(held))
        assert pool.num_shares == len(held) - len(set(held))
        for table in tables:
            assert pool.num_exclusive(table) == sum(held.count(block) == 1 for block in table)
        assert pool.num_exclusive(*tables) == len(set(held))


def test_kept_blocks_go_last_and_the_one_given_back_longest_ago_first() -> None:
    pool, evicted = BlockPool(6, 8), []
    pool.on_evict = evicted.append
    first, second = pool.allocate(3), pool.allocate(2)
    for block in (*first, *second):
        pool.keep(block)
    pool.free(first)
    pool.free(second)
    pool.share(first[:1])  # used again, and given back last
    pool.free(first[:1])
    assert pool.num_free == 6
    pool.allocate(6)
    assert evicted == [first[2], first[1], second[1], second[0], first[0]]


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
    with pytest.raises(AssertionError, match="counted wrongly"):
        pool.check([table, table[:1]])
    with pytest.raises(AssertionError, match="counted wrongly"):
        pool.check([table[:1]])
    pool._empty.pop()
    with pytest.raises(AssertionError, match="2 held \\+ 1 free blocks are not 4"):
        pool.check([table])
