"""Paged attention for the CPU, in numba, compiled for one model shape."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import njit, prange

from slipstream.models.kernels.cpu_math import OPTIONS, exp
from slipstream.models.kernels.cpu_vector import add, element, fma, load, store, zeros

# Rows of one chunk that are computed together, so that each block of keys and values is read once for all of them.
ROWS_OF_TILE = 4

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


def make_attention(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> Callable:
    """A kernel for constant head counts and sizes; how many threads share the work, and which rows lie in a tile,
    changes no bit of a row.

    Softmax in two passes: all scores from the sequence's first key on, then the weighted values in that order. A score
    is a sum over the head's dimensions in one order for every key. The sums over keys begin with the row's first one,
    so their rounding depends on nothing but the number of keys: not on left padding, not on where a block begins.

    Kernel arguments:
        qkv: [rows, (num_heads + 2 * num_kv_heads) * head_dim], of which the queries are read.
        keys: [num_blocks, num_kv_heads, head_dim, block_size].
        values: [num_blocks, num_kv_heads, block_size, head_dim].
        tables: [num_sequences, blocks]; sequences, starts, ends: [num_tokens]; see StepInput.
        tiles: [num_tiles + 1], the first row of each tile, and the number of rows; a tile has rows of one sequence.
        out: [rows, num_heads * head_dim].
    """
    group = num_heads // num_kv_heads  # query heads that share a KV head
    scale = np.float32(head_dim**-0.5)
    in_width, out_width = (num_heads + 2 * num_kv_heads) * head_dim, num_heads * head_dim
    keys_at_once = 16 if block_size % 16 == 0 else 8
    dims_at_once = next(width for width in (64, 32, 16, 8) if head_dim % width == 0)

    @njit(parallel=True, **OPTIONS)
    def attention(qkv, keys, values, tables, sequences, starts, ends, tiles, out):
        for item in prange((tiles.shape[0] - 1) * num_kv_heads):
            tile, kv_head = item // num_kv_heads, item % num_kv_heads
            first, last = tiles[tile], tiles[tile + 1]
            table = tables[sequences[first]]
            start, end = starts[first], ends[first]
            for row in range(first + 1, last):
                start, end = min(start, starts[row]), max(end, ends[row])
            first_block, last_block = start // block_size, (end - 1) // block_size
            # A row's scores begin after `block_size` places, into which a block's keys before the first one go.
            width = end - start + 2 * block_size
            scores = np.empty((last - first) * group * width, np.float32)

            for number in range(first_block, last_block + 1):
                block = (table[number] * num_kv_heads + kv_head) * head_dim * block_size
                for row in range(first, last):
                    if number < starts[row] // block_size or number * block_size >= ends[row]:
                        continue
                    place = (row - first) * group * width + block_size + number * block_size - starts[row]
                    query = row * in_width + kv_head * group * head_dim
                    for _ in range(group):
                        for part in range(0, block_size, keys_at_once):
                            even, odd = zeros(keys_at_once), zeros(keys_at_once)
                            for d in range(0, head_dim, 2):
                                key = block + d * block_size + part
                                even = fma(element(qkv, query + d), load(keys, key, keys_at_once), even)
                                odd = fma(element(qkv, query + d + 1), load(keys, key + block_size, keys_at_once), odd)
                            store(scores, place + part, fma(scale, add(even, odd), zeros(keys_at_once)))
                        query += head_dim
                        place += width

            for row in range(first, last):
                count = ends[row] - starts[row]
                for g in range(group):
                    place = ((row - first) * group + g) * width + block_size
                    weights = scores[place : place + count]
                    most = weights[0]
                    for i in range(count):
                        most = max(most, weights[i])
                    total = _ZERO
                    for i in range(count):
                        weight = exp(weights[i] - most)
                        weights[i] = weight
                        total += weight
                    inverse = _ONE / total
                    for i in range(count):
                        weights[i] *= inverse
                head = row * out_width + kv_head * group * head_dim
                for part in range(0, group * head_dim, dims_at_once):
                    store(out, head + part, zeros(dims_at_once))

            for number in range(first_block, last_block + 1):
                block = (table[number] * num_kv_heads + kv_head) * head_dim * block_size
                for row in range(first, last):
                    begin = max(starts[row], number * block_size)
                    stop = min(ends[row], (number + 1) * block_size)
                    if begin >= stop:
                        continue
                    weight = (row - first) * group * width + block_size - starts[row]
                    head = row * out_width + kv_head * group * head_dim
                    for _ in range(group):
                        for part in range(0, head_dim, dims_at_once):
                            attended = load(out, head + part, dims_at_once)
                            for key in range(begin, stop):
                                value = block + (key - number * block_size) * head_dim + part
                                attended = fma(
                                    element(scores, weight + key), load(values, value, dims_at_once), attended
                                )
                            store(out, head + part, attended)
                        head += head_dim
                        weight += width

    return attention
