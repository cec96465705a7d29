"""Kernels for the CPU, in numba.

Each computes a row from that row's own inputs in an order of operations that depends on nothing else: not on the other
rows, not on how the sequence was cut into chunks, not on which blocks it got. That is what makes results exact under
any schedule. Reductions run from the row's first key on, so left padding does not shift them either.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numba
import numpy as np
import torch
from numba import njit, prange

from slipstream.models.kernels.cpu_attention import ROWS_OF_TILE, make_attention
from slipstream.models.kernels.cpu_math import OPTIONS, exp
from slipstream.models.step_input import StepInput

# OpenMP wakes its threads in a fraction of the time that numba's own work queue takes. An engine's environment lets
# them sleep between regions (OMP_WAIT_POLICY): they and torch's would spin against each other.
numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]  # type: ignore[attr-defined]

# Steps of less work, in keys that their rows attend to, run on one thread: waking the others costs more than it saves.
_SERIAL_KEYS = 512

_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)


@dataclass(slots=True)
class CpuStep:
    """A step's arrays as the kernels read them."""

    input: StepInput
    tiles: np.ndarray  # [num_tiles + 1] int64, the first row of each tile of attention, and the number of rows


@dataclass(slots=True)
class CpuKVCache:
    """Keys and values of one layer."""

    keys: np.ndarray  # [num_blocks, num_kv_heads, head_dim, block_size] float32: scores of a block are its lanes
    values: np.ndarray  # [num_blocks, num_kv_heads, block_size, head_dim] float32


class CpuKernels:
    """The kernels of one model shape. All tensors are float32 and contiguous; rows beyond the batch's are ignored."""

    device = torch.device("cpu")

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, num_threads: int) -> None:
        self._shape = (num_heads, num_kv_heads, head_dim, block_size)
        self._num_threads = min(num_threads, usable_threads())
        self._attention = make_attention(num_heads, num_kv_heads, head_dim, block_size)

    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        _, num_kv_heads, head_dim, _ = self._shape
        return 2 * num_kv_heads * head_dim * 4

    def allocate_cache(self, num_blocks: int) -> CpuKVCache:
        """One layer's cache; pages of memory are taken when first written."""
        _, num_kv_heads, head_dim, block_size = self._shape
        shape = (num_blocks, num_kv_heads)
        return CpuKVCache(
            np.zeros((*shape, head_dim, block_size), np.float32), np.zeros((*shape, block_size, head_dim), np.float32)
        )

    def copy_blocks(self, cache: CpuKVCache, sources: list[int], targets: list[int]) -> None:
        """Copy whole blocks of one layer; all are read before any is written."""
        cache.keys[targets] = cache.keys[sources]
        cache.values[targets] = cache.values[sources]

    def prepare(self, step: StepInput) -> CpuStep:
        """Divide the step's rows into tiles; sets how many threads the step runs on."""
        keys = int((step.context_end - step.context_start).sum())
        numba.set_num_threads(1 if keys < _SERIAL_KEYS else self._num_threads)
        rows = np.arange(step.num_tokens)
        first = np.searchsorted(step.sequences, step.sequences)  # row of each row's sequence
        return CpuStep(step, np.append(rows[(rows - first) % ROWS_OF_TILE == 0], step.num_tokens))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, num_tokens: int) -> torch.Tensor:
        """[rows, hidden] -> x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich, 2019)."""
        out = torch.empty_like(x)
        _rms_norm(x.numpy(), weight.numpy(), np.float32(epsilon), out.numpy(), num_tokens)
        return out

    def add_rms_norm(
        self, delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, num_tokens: int
    ) -> torch.Tensor:
        """residual += delta, in place; returns its RMS norm. All [rows, hidden]."""
        out = torch.empty_like(residual)
        _add_rms_norm(delta.numpy(), residual.numpy(), weight.numpy(), np.float32(epsilon), out.numpy(), num_tokens)
        return out

    def head_norm(self, qkv: torch.Tensor, first: int, count: int, weight: torch.Tensor, epsilon: float) -> None:
        """RMS norm of each of `count` heads from head `first` on, in place (Qwen3). qkv: [rows, heads * head_dim]."""
        head_dim = self._shape[2]
        heads = qkv.numpy()[:, first * head_dim : (first + count) * head_dim]
        _head_norm(heads, head_dim, weight.numpy(), np.float32(epsilon))

    def rotate_and_store(
        self, qkv: torch.Tensor, cache: CpuKVCache, step: CpuStep, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        """Rotate queries in place, rotate keys, and write keys and values to their slots.

        Args:
            qkv: [rows, (num_heads + 2 * num_kv_heads) * head_dim].
            cos, sin: [max_model_len, head_dim / 2], rotary embedding in the half-split form (Su et al., 2021).
        """
        _rotate_and_store(
            qkv.numpy(),
            cache.keys,
            cache.values,
            step.input.positions,
            step.input.slots,
            cos.numpy(),
            sin.numpy(),
            *self._shape,
        )

    def attention(self, qkv: torch.Tensor, cache: CpuKVCache, step: CpuStep) -> torch.Tensor:
        """Causal attention of each row over its sequence's cache. Returns [rows, num_heads * head_dim]."""
        num_heads, _, head_dim, _ = self._shape
        out = torch.empty(qkv.shape[0], num_heads * head_dim)
        self._attention(
            qkv.numpy(),
            cache.keys,
            cache.values,
            step.input.block_tables,
            step.input.sequences,
            step.input.context_start,
            step.input.context_end,
            step.tiles,
            out.numpy(),
        )
        return out

    def silu_mul(self, gate_up: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """[rows, 2 * width] -> silu(gate) * up, [rows, width] (Shazeer, 2020)."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, width)
        _silu_mul(gate_up.numpy(), out.numpy(), num_tokens)
        return out


def usable_threads() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


@njit(**OPTIONS)
def _rms_norm(x, weight, epsilon, out, num_tokens):
    hidden = x.shape[1]
    for row in range(num_tokens):
        total = _ZERO
        for i in range(hidden):
            total += x[row, i] * x[row, i]
        factor = _ONE / np.sqrt(total / np.float32(hidden) + epsilon)
        for i in range(hidden):
            out[row, i] = x[row, i] * factor * weight[i]


@njit(**OPTIONS)
def _add_rms_norm(delta, residual, weight, epsilon, out, num_tokens):
    hidden = residual.shape[1]
    for row in range(num_tokens):
        added, kept, normed = delta[row], residual[row], out[row]
        total = _ZERO
        for i in range(hidden):
            value = kept[i] + added[i]
            kept[i] = value
            total += value * value
        factor = _ONE / np.sqrt(total / np.float32(hidden) + epsilon)
        for i in range(hidden):
            normed[i] = kept[i] * factor * weight[i]


@njit(**OPTIONS)
def _head_norm(heads, head_dim, weight, epsilon):
    for row in range(heads.shape[0]):
        for start in range(0, heads.shape[1], head_dim):
            total = _ZERO
            for i in range(head_dim):
                total += heads[row, start + i] * heads[row, start + i]
            factor = _ONE / np.sqrt(total / np.float32(head_dim) + epsilon)
            for i in range(head_dim):
                heads[row, start + i] = heads[row, start + i] * factor * weight[i]


@njit(**OPTIONS)
def _rotate_and_store(qkv, keys, values, positions, slots, cos, sin, num_heads, num_kv_heads, head_dim, block_size):
    half = head_dim // 2
    for row in range(positions.shape[0]):
        position = positions[row]
        block, offset = slots[row] // block_size, slots[row] % block_size
        c, s = cos[position], sin[position]
        for head in range(num_heads):
            low = qkv[row, head * head_dim : head * head_dim + half]
            high = qkv[row, head * head_dim + half : (head + 1) * head_dim]
            for i in range(half):
                a, b = low[i], high[i]
                low[i] = a * c[i] - b * s[i]
                high[i] = b * c[i] + a * s[i]
        for head in range(num_kv_heads):
            base = (num_heads + head) * head_dim
            low, high = qkv[row, base : base + half], qkv[row, base + half : base + head_dim]
            key = keys[block, head]
            for i in range(half):
                key[i, offset] = low[i] * c[i] - high[i] * s[i]
                key[half + i, offset] = high[i] * c[i] + low[i] * s[i]
            base += num_kv_heads * head_dim
            values[block, head, offset] = qkv[row, base : base + head_dim]


@njit(parallel=True, **OPTIONS)
def _silu_mul(gate_up, out, num_tokens):
    width = out.shape[1]
    for row in prange(num_tokens):
        for i in range(width):
            gate = gate_up[row, i]
            out[row, i] = gate / (_ONE + exp(-gate)) * gate_up[row, width + i]
