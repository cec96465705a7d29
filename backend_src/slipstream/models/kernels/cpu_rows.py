"""What a step computes row by row between its matmuls, by all threads of a team."""

from __future__ import annotations

import numpy as np
from numba import njit

from slipstream.models.kernels.cpu_math import OPTIONS
from slipstream.models.kernels.cpu_team import ROWS_AT_ONCE, barrier, take
from slipstream.models.kernels.cpu_tile import LANES, highest, load_stored, store_stored

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@njit(**OPTIONS)
def embed(team, token_ids, table, residual):
    """residual[row] = table[token_ids[row]]; table: [vocab, hidden] as weights are stored."""
    while True:
        first = take(team) * ROWS_AT_ONCE
        if first >= token_ids.shape[0]:
            break
        for row in range(first, min(first + ROWS_AT_ONCE, token_ids.shape[0])):
            for i in range(residual.shape[1]):
                residual[row, i] = load_stored(table, token_ids[row] * residual.shape[1] + i)
    barrier(team)


@njit(**OPTIONS)
def rms_norm(team, residual, num_rows, weight, epsilon, out):
    """out = x / sqrt(mean(x^2) + epsilon) * weight of each row (Zhang and Sennrich, 2019)."""
    while True:
        first = take(team) * ROWS_AT_ONCE
        if first >= num_rows:
            break
        for row in range(first, min(first + ROWS_AT_ONCE, num_rows)):
            _norm(residual[row], weight, epsilon, out[row])
    barrier(team)


@njit(**OPTIONS)
def add_rms_norm(team, delta, residual, num_rows, weight, epsilon, out):
    """residual += delta, then its RMS norm."""
    while True:
        first = take(team) * ROWS_AT_ONCE
        if first >= num_rows:
            break
        for row in range(first, min(first + ROWS_AT_ONCE, num_rows)):
            for i in range(residual.shape[1]):
                residual[row, i] += delta[row, i]
            _norm(residual[row], weight, epsilon, out[row])
    barrier(team)


@njit(**OPTIONS)
def select_rms_norm(team, delta, residual, rows, weight, epsilon, out):
    """The RMS norm of residual + delta for some rows alone: out[i] is that of row rows[i]."""
    while True:
        first = take(team) * ROWS_AT_ONCE
        if first >= rows.shape[0]:
            break
        for place in range(first, min(first + ROWS_AT_ONCE, rows.shape[0])):
            row = rows[place]
            # Not in place: a row may be asked for twice.
            for i in range(residual.shape[1]):
                out[place, i] = residual[row, i] + delta[row, i]
            _norm(out[place], weight, epsilon, out[place])
    barrier(team)


@njit(**OPTIONS)
def rotate_and_store(team, heads, qkv, query_norm, key_norm, epsilon, keys, values, step, cos, sin):
    """Norm the heads of queries and keys where the model does, rotate both, write keys and values to their slots.

    Args:
        heads: Heads.
        qkv: [rows, (num_heads + 2 * num_kv_heads) * head_dim], changed in place.
        query_norm, key_norm: [head_dim], or empty where the model has none (Qwen3 has).
        keys, values: see `attention`.
        step: StepArrays.
        cos, sin: [max_model_len, head_dim / 2], rotary embedding in the half-split form (Su et al., 2021).
    """
    num_heads, num_kv_heads, head_dim = heads.num_heads, heads.num_kv_heads, heads.head_dim
    half = head_dim // 2
    block_size = values.shape[3]
    while True:
        first = take(team) * ROWS_AT_ONCE
        if first >= step.positions.shape[0]:
            break
        for row in range(first, min(first + ROWS_AT_ONCE, step.positions.shape[0])):
            c, s = cos[step.positions[row]], sin[step.positions[row]]
            block, offset = step.slots[row] // block_size, step.slots[row] % block_size
            for head in range(num_heads + num_kv_heads):
                vector = qkv[row, head * head_dim : (head + 1) * head_dim]
                if head < num_heads and query_norm.shape[0]:
                    _norm(vector, query_norm, epsilon, vector)
                elif head >= num_heads and key_norm.shape[0]:
                    _norm(vector, key_norm, epsilon, vector)
                for i in range(half):
                    low, high = vector[i], vector[half + i]
                    vector[i] = low * c[i] - high * s[i]
                    vector[half + i] = high * c[i] + low * s[i]
            for head in range(num_kv_heads):
                place = (block * num_kv_heads + head) * block_size * head_dim
                key = place + offset // LANES * head_dim * LANES + offset % LANES
                value = place + offset * LANES
                for i in range(head_dim):
                    store_stored(keys, key + i * LANES, qkv[row, (num_heads + head) * head_dim + i])
                for i in range(head_dim):
                    at = value + i // LANES * block_size * LANES + i % LANES
                    store_stored(values, at, qkv[row, (num_heads + num_kv_heads + head) * head_dim + i])
    barrier(team)


@njit(**OPTIONS)
def find_highest(team, logits, num_rows, vocab_size, best, token_ids):
    """The highest of each row's logits and the lowest id that has it; NaN, with any id, where one of them is NaN."""
    while True:
        row = take(team)
        if row >= num_rows:
            break
        values = logits[row, :vocab_size]
        most, total = highest(values), _ZERO
        for i in range(vocab_size):
            total += values[i] * _ZERO  # NaN where one is NaN or infinite
        if total != total:
            for i in range(vocab_size):
                if values[i] != values[i]:
                    most = values[i]
        found = 0
        while found < vocab_size - 1 and values[found] != most:
            found += 1
        best[row], token_ids[row] = most, found
    barrier(team)


@njit(**OPTIONS)
def _norm(x, weight, epsilon, out):
    total = _ZERO
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    factor = _ONE / np.sqrt(total / np.float32(x.shape[0]) + epsilon)
    for i in range(x.shape[0]):
        out[i] = x[i] * factor * weight[i]
