"""Blocks that already hold the keys and values of a prompt's beginning: found, shared, and kept after their request.

Only full blocks of tokens that were really computed are ever offered, and a hit never covers the last known token: its
logits are needed.
"""

from __future__ import annotations

from itertools import count

from slipstream.engine.block_pool import BlockPool
from slipstream.engine.request import Request

# What determines a block's contents: what stands before it, and its tokens. Before the first block stands the salt;
# before any other the link of the block there, a number that is given out once and never again. So a dictionary of such
# pairs is a chain of hashes, each with a comparison: equal hashes of different tokens cost time and corrupt nothing.
Link = int | str
_Contents = tuple[Link, tuple[int, ...]]


class PrefixCache:
    """Knows which block holds which tokens after which beginning.

    Attributes:
        queried_tokens, hit_tokens: of requests when they were first admitted, how many tokens were looked up and found.
        readmission_queried_tokens, readmission_hit_tokens: the same for requests that come back from a preemption.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: dict[_Contents, int] = {}
        self._contents: dict[int, _Contents] = {}  # the other way round
        self._links: dict[int, int] = {}  # by block
        self._numbers = count()
        self.queried_tokens = self.hit_tokens = 0
        self.readmission_queried_tokens = self.readmission_hit_tokens = 0
        pool.on_evict = self._forget

    def find(self, request: Request) -> list[int]:
        """The blocks of the longest known beginning of a request that is not computed at all."""
        size = self._pool.block_size
        link: Link = request.cache_salt
        blocks: list[int] = []
        for start in range(0, (request.num_tokens - 1) // size * size, size):
            block = self._blocks.get((link, tuple(request.token_ids[start : start + size])))
            if block is None:
                break
            blocks.append(block)
            link = self._links[block]
        return blocks

    def admit(self, request: Request, blocks: list[int]) -> None:
        """Give a request the blocks that were found for it; the tokens in them count as computed."""
        self._pool.share(blocks)
        request.block_table = list(blocks)
        request.num_computed = len(blocks) * self._pool.block_size
        request.num_offered_blocks = len(blocks)
        request.cache_link = self._links[blocks[-1]] if blocks else request.cache_salt
        if request.choice:
            return  # it takes what its first has, and that one is counted
        if request.num_preemptions:
            self.readmission_queried_tokens += request.num_tokens
            self.readmission_hit_tokens += request.num_computed
        else:
            request.num_cached = request.num_computed
            self.queried_tokens += request.num_tokens
            self.hit_tokens += request.num_computed

    def offer(self, request: Request) -> None:
        """Let others find the blocks of a request that have become full; where one is known already, that one stays."""
        size = self._pool.block_size
        while (end := (request.num_offered_blocks + 1) * size) <= request.num_computed:
            contents = (request.cache_link, tuple(request.token_ids[end - size : end]))
            block = self._blocks.get(contents)
            if block is None:
                block = request.block_table[request.num_offered_blocks]
                self._blocks[contents] = block
                self._contents[block] = contents
                self._links[block] = next(self._numbers)
                self._pool.keep(block)
            request.cache_link = self._links[block]
            request.num_offered_blocks += 1

    def _forget(self, block: int) -> None:
        del self._blocks[self._contents.pop(block)]
        del self._links[block]
