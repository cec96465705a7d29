"""Paged attention for the CPU, in numba, compiled for one model shape."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import njit, prange

from slipstream.models.kernels.cpu_math import INLINE, OPTIONS, exp

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


def make_attention(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> Callable:
    """A kernel for constant head counts and sizes; how many threads share the rows changes no bit of them.

    Kernel arguments:
        qkv: [rows, (num_heads + 2 * num_kv_heads) * head_dim], of which the queries are read.
        keys, values: [num_blocks, num_kv_heads, block_size, head_dim].
        tables: [num_sequences, blocks]; sequences, starts, ends: [num_tokens]; see StepInput.
        out: [rows, num_heads * head_dim].
    """
    group = num_heads // num_kv_heads  # query heads that share a KV head
    shape = (group, num_kv_heads, head_dim, block_size, np.float32(head_dim**-0.5))

    @njit(parallel=True, **OPTIONS)
    def attention(qkv, keys, values, tables, sequences, starts, ends, out):
        for row in prange(sequences.shape[0]):
            _attend(row, qkv, keys, values, tables[sequences[row]], starts[row], ends[row], out, shape)

    return attention


# A global, not a closure of the kernels: numba's cache key would hold the closure's dispatcher, which is new each time.
@njit(**INLINE)
def _attend(row, qkv, keys, values, table, start, end, out, shape):
    """Softmax in two passes: all scores from the sequence's first key on, then the weighted values in that order.

    Scores lie in a buffer that starts with the first key, so vector lanes, and with them the rounding, depend on
    the number of keys alone: not on left padding, and not on where in a block the first key lies.
    """
    group, num_kv_heads, head_dim, block_size, scale = shape
    count = end - start
    scores = np.empty((group, count), np.float32)
    for kv_head in range(num_kv_heads):
        base = kv_head * group * head_dim
        key = 0
        while key < count:
            block, offset = table[(start + key) // block_size], (start + key) % block_size
            length = min(block_size - offset, count - key)
            for i in range(length):
                k = keys[block, kv_head, offset + i]
                for g in range(group):
                    query = qkv[row, base + g * head_dim : base + (g + 1) * head_dim]
                    dot = _ZERO
                    for d in range(head_dim):
                        dot += query[d] * k[d]
                    scores[g, key + i] = dot * scale
            key += length
        for g in range(group):
            weights = scores[g]
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
            out[row, base + g * head_dim : base + (g + 1) * head_dim] = _ZERO
        key = 0
        while key < count:
            block, offset = table[(start + key) // block_size], (start + key) % block_size
            length = min(block_size - offset, count - key)
            for g in range(group):
                attended = out[row, base + g * head_dim : base + (g + 1) * head_dim]
                for i in range(length):
                    weight, value = scores[g, key + i], values[block, kv_head, offset + i]
                    for d in range(head_dim):
                        attended[d] += weight * value[d]
            key += length
