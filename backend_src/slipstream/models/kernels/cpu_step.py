"""A whole step of a Llama-family model on the CPU as one compiled function that each thread of a team runs.

It is written like the model's forward pass: parts of work one after the other, each shared out among the threads, each
ended by a barrier. Nothing in it returns to Python, and no row's result depends on another row's, on how a sequence was
cut into chunks, or on which blocks and which thread it got. That is what makes answers exact under any schedule.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from slipstream.models.kernels.cpu_attention import attention
from slipstream.models.kernels.cpu_math import OPTIONS
from slipstream.models.kernels.cpu_matmul import Matrix, Quantised, gated_matmul, matmul
from slipstream.models.kernels.cpu_rows import (
    add_rms_norm,
    embed,
    find_highest,
    rms_norm,
    rotate_and_store,
    select_rms_norm,
)
from slipstream.models.kernels.cpu_team import lap


class Heads(NamedTuple):
    """The shape of attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class Weights(NamedTuple):
    """A model's weights, packed for the CPU. Matrices hold fp16 as uint16, float32 or int8; all else is
    float32."""

    embedding: np.ndarray  # [vocab, hidden], as the matrices, but fp16 beside int8
    input_norm: np.ndarray  # [num_layers, hidden]
    qkv: Matrix  # hidden -> (num_heads + 2 * num_kv_heads) * head_dim
    query_norm: np.ndarray  # [num_layers, head_dim] of Qwen3, else [num_layers, 0]
    key_norm: np.ndarray  # likewise
    output: Matrix  # num_heads * head_dim -> hidden
    mlp_norm: np.ndarray  # [num_layers, hidden]
    gate_up: Matrix  # hidden -> 2 * intermediate, panels of gate and up in turn
    down: Matrix  # intermediate -> hidden
    final_norm: np.ndarray  # [hidden]
    lm_head: Matrix  # hidden -> vocab, one layer


class Cache(NamedTuple):
    """Keys and values of all layers, float32 or fp16 as uint16."""

    keys: np.ndarray  # [num_layers, num_blocks, num_kv_heads, block_size / 16, head_dim, 16]: a panel is 16 keys
    values: np.ndarray  # [num_layers, num_blocks, num_kv_heads, head_dim / 16, block_size, 16]: 16 dimensions


class StepArrays(NamedTuple):
    """What of a StepInput the kernels read, and the tiles of rows that attention computes together."""

    token_ids: np.ndarray  # [num_tokens] int64
    positions: np.ndarray  # [num_tokens] int32
    slots: np.ndarray  # [num_tokens] int32
    sequences: np.ndarray  # [num_tokens] int32
    starts: np.ndarray  # [num_tokens] int32
    ends: np.ndarray  # [num_tokens] int32
    tables: np.ndarray  # [num_sequences, blocks] int32
    logit_rows: np.ndarray  # [num_rows] int64
    tiles: np.ndarray  # [num_tiles + 1] int64, the first row of each tile, and the number of rows


class Workspace(NamedTuple):
    """Where a step keeps what its parts pass on; at least as many rows as the step has. All float32."""

    residual: np.ndarray  # [rows, hidden]
    normed: np.ndarray  # [rows, hidden]
    qkv: np.ndarray  # [rows, (num_heads + 2 * num_kv_heads) * head_dim]
    attended: np.ndarray  # [rows, num_heads * head_dim]
    gated: np.ndarray  # [rows, intermediate]
    delta: np.ndarray  # [rows, hidden], what is added to the residual next
    quantised: Quantised
    queries: np.ndarray  # [num_threads, ...], see attention
    scores: np.ndarray  # [num_threads, ..., width], see attention
    seconds: np.ndarray  # [num_threads, parts + 1] float64, see PARTS and lap


class LogitArrays(NamedTuple):
    """What a step comes to."""

    values: np.ndarray  # [num_rows, vocab, filled up to a multiple of 16] float32
    highest: np.ndarray  # [num_rows] float32
    token_ids: np.ndarray  # [num_rows] int64, the lowest id of the highest logit


# Where the time of a step goes; `lap` notes it for the team's first thread.
PARTS = ("idle", "rows", "matmul", "rotary", "attention", "lm_head", "highest")
IDLE, ROWS, MATMUL, ROTARY, ATTENTION, LM_HEAD, HIGHEST = range(len(PARTS))


@njit(**OPTIONS)
def run_step(thread, team, heads, epsilon, weights, cos, sin, cache, step, work, logits):
    """Compute a step; called once by each thread of the team, with its number."""
    w = weights
    num_rows = step.token_ids.shape[0]
    queries, scores, seconds = work.queries[thread], work.scores[thread], work.seconds[thread]
    lap(seconds, IDLE)
    embed(team, step.token_ids, w.embedding, work.residual)
    for layer in range(w.input_norm.shape[0]):
        if layer == 0:
            rms_norm(team, work.residual, num_rows, w.input_norm[layer], epsilon, work.normed)
        else:
            add_rms_norm(team, work.delta, work.residual, num_rows, w.input_norm[layer], epsilon, work.normed)
        lap(seconds, ROWS)
        matmul(team, work.normed, num_rows, w.qkv, layer, work.quantised, work.qkv)
        lap(seconds, MATMUL)
        keys, values = cache.keys[layer], cache.values[layer]
        rotate_and_store(
            team, heads, work.qkv, w.query_norm[layer], w.key_norm[layer], epsilon, keys, values, step, cos, sin
        )
        lap(seconds, ROTARY)
        attention(team, heads, work.qkv, keys, values, step, queries, scores, work.attended)
        lap(seconds, ATTENTION)
        matmul(team, work.attended, num_rows, w.output, layer, work.quantised, work.delta)
        lap(seconds, MATMUL)
        add_rms_norm(team, work.delta, work.residual, num_rows, w.mlp_norm[layer], epsilon, work.normed)
        lap(seconds, ROWS)
        gated_matmul(team, work.normed, num_rows, w.gate_up, layer, work.quantised, work.gated)
        matmul(team, work.gated, num_rows, w.down, layer, work.quantised, work.delta)
        lap(seconds, MATMUL)
    num_logits = step.logit_rows.shape[0]
    select_rms_norm(team, work.delta, work.residual, step.logit_rows, w.final_norm, epsilon, work.normed)
    lap(seconds, ROWS)
    matmul(team, work.normed, num_logits, w.lm_head, 0, work.quantised, logits.values)
    lap(seconds, LM_HEAD)
    find_highest(team, logits.values, num_logits, w.embedding.shape[0], logits.highest, logits.token_ids)
    lap(seconds, HIGHEST)
