"""A fixed pool of KV blocks. A block is an index; who holds it is known to the holders' block tables alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain


class BlockPool:
    """Hands out and takes back block indices in O(1) each; several tables may hold the same block.

    A block whose contents are worth keeping stays as it is when nobody holds it any more, until there is no other
    block to hand out; the one that was given back longest ago goes first. Of the others, the one that was given back
    last is handed out first, while its memory is still warm.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.on_evict: Callable[[int], None] = lambda block: None  # called with a kept block that is handed out anew
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._kept: dict[int, None] = {}  # held by nobody, in the order in which they were given back
        self._worth_keeping: set[int] = set()
        self._num_holders = [0] * num_blocks
        self.num_shares = 0  # sum over all blocks of the holders beyond the first

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, those with contents worth keeping among them."""
        return len(self._empty) + len(self._kept)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_kept(self) -> int:
        """Free blocks with contents worth keeping."""
        return len(self._kept)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks; the caller has checked that there are as many.

        Raises:
            ValueError: fewer than `count` blocks are free.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} free")
        blocks = []
        for _ in range(count):
            block = self._empty.pop() if self._empty else self._evict()
            self._num_holders[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: list[int]) -> None:
        """Hold blocks that are in use already, or free with their contents kept."""
        for block in blocks:
            self._kept.pop(block, None)
            self.num_shares += self._num_holders[block] > 0
            self._num_holders[block] += 1

    def free(self, blocks: list[int]) -> None:
        """Give blocks back, the last of the list first.

        Raises:
            ValueError: a block is not in use (freed twice).
        """
        for block in reversed(blocks):
            if not self._num_holders[block]:
                raise ValueError(f"block {block} freed twice")
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                self.num_shares -= 1
            elif block in self._worth_keeping:
                self._kept[block] = None
            else:
                self._empty.append(block)

    def keep(self, block: int) -> None:
        """Say that the contents of a block in use are worth keeping."""
        self._worth_keeping.add(block)

    def num_kept_of(self, blocks: list[int]) -> int:
        """How many of `blocks` are free."""
        return sum(not self._num_holders[block] for block in blocks)

    def num_exclusive(self, *tables: list[int]) -> int:
        """How many blocks of these tables no other table holds: what is free once all of them are given back."""
        if not self.num_shares:
            return sum(map(len, tables))
        holders = Counter(chain.from_iterable(tables))
        return sum(self._num_holders[block] == count for block, count in holders.items())

    def check(self, tables: list[list[int]]) -> None:
        """Assert that every block is either free or held exactly as often as it stands in the given tables."""
        holders = Counter(block for table in tables for block in table)
        assert [holders[block] for block in range(self.num_blocks)] == self._num_holders, "holders are counted wrongly"
        assert self.num_shares == sum(count - 1 for count in holders.values())
        assert self._worth_keeping.issuperset(self._kept)
        free = [*self._empty, *self._kept]
        if sorted([*holders, *free]) != list(range(self.num_blocks)):
            raise AssertionError(f"{len(holders)} held + {len(free)} free blocks are not {self.num_blocks}")

    def _evict(self) -> int:
        block = next(iter(self._kept))
        del self._kept[block]
        self._worth_keeping.discard(block)
        self.on_evict(block)
        return block
