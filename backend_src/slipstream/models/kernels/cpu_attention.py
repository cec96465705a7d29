"""Paged attention for the CPU by all threads of a team: two matmuls with keys and values that lie in panels.

Softmax in two passes: all scores from the sequence's first key on, then the weighted values in that order. The sums
over keys begin with the row's first one, so their rounding depends on nothing but the number of keys: not on left
padding, not on where a block begins, not on which rows are computed together.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from slipstream.models.kernels.cpu_math import OPTIONS, exp
from slipstream.models.kernels.cpu_team import barrier, take
from slipstream.models.kernels.cpu_tile import LANES, highest, multiply_panel, prefetch

# Rows of one chunk that are computed together, so that each block of keys and values is read once for all of them.
ROWS_OF_TILE = 8

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@njit(**OPTIONS)
def attention(team, heads, qkv, keys, values, step, queries, scores, out):
    """Causal attention of each row over its sequence's cache.

    Args:
        heads: Heads.
        qkv: [rows, (num_heads + 2 * num_kv_heads) * head_dim], of which the queries are read.
        keys: [num_blocks, num_kv_heads, block_size / 16, head_dim, 16]: a panel is 16 keys.
        values: [num_blocks, num_kv_heads, head_dim / 16, block_size, 16]: a panel is 16 dimensions.
        step: StepArrays.
        queries: this thread's own place for the queries of one tile, [ROWS_OF_TILE * group * head_dim].
        scores: likewise for the scores, [ROWS_OF_TILE * group, at least the longest context and two blocks].
        out: [rows, num_heads * head_dim].
    """
    head_dim, group = heads.head_dim, heads.num_heads // heads.num_kv_heads
    block_size = values.shape[3]
    block_elements = head_dim * block_size
    width = scores.shape[1]
    zeros = np.zeros(LANES, np.float32)
    scale = _ONE / np.sqrt(np.float32(head_dim))
    while True:
        item = take(team)
        if item >= (step.tiles.shape[0] - 1) * heads.num_kv_heads:
            break
        tile, kv_head = item // heads.num_kv_heads, item % heads.num_kv_heads
        first, last = step.tiles[tile], step.tiles[tile + 1]
        table = step.tables[step.sequences[first]]
        start, end = step.starts[first], step.ends[first]
        for row in range(first + 1, last):
            start, end = min(start, step.starts[row]), max(end, step.ends[row])
        first_block, last_block = start // block_size, (end - 1) // block_size
        base = first_block * block_size  # of the key whose scores are the first column
        num_queries = (last - first) * group

        for row in range(first, last):
            for i in range(group * head_dim):
                query = qkv[row, kv_head * group * head_dim + i]
                queries[(row - first) * group * head_dim + i] = query * scale

        for number in range(first_block, last_block + 1):
            block = (table[number] * heads.num_kv_heads + kv_head) * block_elements
            if number < last_block:
                _prefetch(keys, (table[number + 1] * heads.num_kv_heads + kv_head) * block_elements, block_elements)
            for part in range(0, block_size, LANES):
                multiply_panel(
                    num_queries, scores, number * block_size - base + part, width, zeros, 0, 0,
                    queries, 0, head_dim, keys, block + part * head_dim, head_dim,
                )  # fmt: skip

        for row in range(first, last):
            for g in range(group):
                _softmax(scores[(row - first) * group + g, step.starts[row] - base : step.ends[row] - base])

        # From here on in place of the queries.
        attended = queries
        attended[: num_queries * head_dim] = _ZERO
        for number in range(first_block, last_block + 1):
            block = (table[number] * heads.num_kv_heads + kv_head) * block_elements
            if number < last_block:
                _prefetch(values, (table[number + 1] * heads.num_kv_heads + kv_head) * block_elements, block_elements)
            row = first
            while row < last:
                begin, stop = _part_of_block(step, row, number, block_size)
                alike = 1
                while row + alike < last and _part_of_block(step, row + alike, number, block_size) == (begin, stop):
                    alike += 1
                query = (row - first) * group
                for panel in range(0, head_dim, LANES):
                    multiply_panel(
                        alike * group, attended, query * head_dim + panel, head_dim,
                        attended, query * head_dim + panel, head_dim, scores, query * width + begin - base, width,
                        values, block + panel * block_size + (begin - number * block_size) * LANES, stop - begin,
                    )  # fmt: skip
                row += alike

        for row in range(first, last):
            for i in range(group * head_dim):
                out[row, kv_head * group * head_dim + i] = attended[(row - first) * group * head_dim + i]
    barrier(team)


@njit(**OPTIONS)
def _part_of_block(step, row, number, block_size):
    """The first key of a block that a row attends to, and the one behind the last; equal where it attends to none."""
    begin = max(step.starts[row], number * block_size)
    return begin, max(begin, min(step.ends[row], (number + 1) * block_size))


@njit(**OPTIONS)
def _prefetch(array, place, size):
    """Ask for a block before it is needed: blocks are too short for a processor to foresee where the next lies."""
    for element in range(0, size, LANES):
        prefetch(array, place + element)


@njit(**OPTIONS)
def _softmax(weights):
    most = highest(weights)
    total = _ZERO
    for i in range(weights.shape[0]):
        weight = exp(weights[i] - most)
        weights[i] = weight
        total += weight
    inverse = _ONE / total
    for i in range(weights.shape[0]):
        weights[i] *= inverse
