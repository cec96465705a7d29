"""A fixed pool of KV blocks. A block is an index; who holds it is known to the holder's block table alone."""

from __future__ import annotations


class BlockPool:
    """Hands out and takes back block indices in O(1) each.

    Freed blocks are handed out again first, while their memory is still warm.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._used = [False] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks; the caller has checked that there are as many.

        Raises:
            ValueError: fewer than `count` blocks are free.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._used[block] = True
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Give blocks back.

        Raises:
            ValueError: a block is not in use (freed twice).
        """
        for block in reversed(blocks):
            if not self._used[block]:
                raise ValueError(f"block {block} freed twice")
            self._used[block] = False
            self._free.append(block)

    def check(self, tables: list[list[int]]) -> None:
        """Assert that every block is either free or in exactly one of the given tables."""
        held = [block for table in tables for block in table]
        if len(set(held)) != len(held):
            raise AssertionError("a block is held twice")
        if sorted(held + self._free) != list(range(self.num_blocks)):
            raise AssertionError(f"{len(held)} held + {len(self._free)} free blocks are not {self.num_blocks}")
