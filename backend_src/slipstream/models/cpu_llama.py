"""Decoders of the Llama family on the CPU: weights, KV cache and workspace around the compiled step."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from slipstream.engine.sampler import Logits
from slipstream.errors import ConfigError
from slipstream.models.kernels.cpu_attention import ROWS_OF_TILE
from slipstream.models.kernels.cpu_matmul import Quantised
from slipstream.models.kernels.cpu_step import (
    PARTS,
    Cache,
    Heads,
    LogitArrays,
    StepArrays,
    Weights,
    Workspace,
    run_step,
)
from slipstream.models.kernels.cpu_team import make_team
from slipstream.models.kernels.cpu_tile import LANES
from slipstream.models.rope import rotary_tables
from slipstream.models.step_input import StepInput
from slipstream.models.weights import ModelConfig

# Steps of fewer multiplications run on one thread: to wake the others costs more than it saves.
_SERIAL_PRODUCTS = 4_000_000
# The buffer for more rows of logits than these is given back after the step.
_KEPT_LOGITS = 512


class CpuLlama:
    """Weights of one model and its forward pass, compiled."""

    batch_invariant = True

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        max_model_len: int,
        block_size: int,
        threads: int,
        kv_cache_dtype: str = "fp32",
    ) -> None:
        """Around weights that are packed already.

        Raises:
            ConfigError: a block size that the kernels do not compute.
        """
        if block_size % LANES:
            raise ConfigError(f"block_size is {block_size}; the CPU's kernels compute multiples of {LANES}")
        self.config = config
        self.weights = weights
        self._block_size = block_size
        self._kv_dtype = np.dtype(np.uint16 if kv_cache_dtype == "fp16" else np.float32)
        self._heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        cos, sin = rotary_tables(config.rope, config.head_dim, max_model_len, torch.device("cpu"))
        self._cos, self._sin = cos.numpy(), sin.numpy()
        self._int8 = weights.qkv.panels.dtype == np.int8
        self._teams = [make_team(1), make_team(threads)]
        self._others = ThreadPoolExecutor(max_workers=max(threads - 1, 1), thread_name_prefix="step")
        self._num_threads = threads
        w = weights
        self._num_weights = sum(matrix.panels.size for matrix in (w.qkv, w.output, w.gate_up, w.down, w.lm_head))
        self._seconds = np.zeros((threads, len(PARTS) + 1))
        self._cache = Cache(np.zeros(0), np.zeros(0))
        self._work = self._make_workspace(rows=1, width=1)
        self._logits = LogitArrays(np.empty((0, 0), np.float32), np.empty(0, np.float32), np.empty(0, np.int64))

    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.config.num_layers * self.config.num_kv_heads * self.config.head_dim * self._kv_dtype.itemsize

    def allocate_cache(self, num_blocks: int) -> None:
        """Pages of memory are taken when first written."""
        config = self.config
        shape = (config.num_layers, num_blocks, config.num_kv_heads)
        self._cache = Cache(
            _zeros((*shape, self._block_size // LANES, config.head_dim, LANES), self._kv_dtype),
            _zeros((*shape, config.head_dim // LANES, self._block_size, LANES), self._kv_dtype),
        )

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy what lies in blocks of the cache to other blocks, as (from, to); all are read before any is written."""
        sources, targets = (list(blocks) for blocks in zip(*copies, strict=True))
        for array in self._cache:
            array[:, targets] = array[:, sources]

    def forward(self, step: StepInput) -> Logits:
        """Put a batch's tokens through the model: logits of its `logit_rows`, valid until the next step."""
        num_tokens, num_logits = step.num_tokens, len(step.logit_rows)
        # A lock-step row that has ended is computed on, in the end past the context; its results serve nobody.
        np.minimum(step.positions, len(self._cos) - 1, out=step.positions)
        work = self.workspace(max(num_tokens, num_logits), int(step.context_end.max()) + 2 * self._block_size)
        logits = self.logit_arrays(num_logits)
        epsilon = np.float32(self.config.rms_norm_eps)
        tables = (self._cos, self._sin)
        self.run_threads(
            run_step,
            num_tokens,
            self._heads,
            epsilon,
            self.weights,
            *tables,
            self._cache,
            step_arrays(step),
            work,
            logits,
        )
        values, highest, token_ids = (torch.from_numpy(array[:num_logits]) for array in logits)
        return Logits(values[:, : self.config.vocab_size], highest, token_ids)

    def run_threads(self, function: Callable[..., None], num_tokens: int, *arguments: Any) -> None:
        """Call a compiled function of (thread, team, *arguments) by as many threads as a step of that size is worth."""
        parallel = self._num_threads > 1 and num_tokens * self._num_weights >= _SERIAL_PRODUCTS
        team = self._teams[parallel]
        others = [self._others.submit(function, n, team, *arguments) for n in range(1, self._num_threads) if parallel]
        function(0, team, *arguments)
        for other in others:
            other.result()

    def part_seconds(self) -> dict[str, float]:
        """The time of all steps so far by part, as the first thread has seen it."""
        return {part: float(seconds) for part, seconds in zip(PARTS, self._seconds[0], strict=False) if part != "idle"}

    def workspace(self, rows: int, width: int = 1) -> Workspace:
        """A workspace for so many rows and scores of so many keys; it is kept, and grows."""
        has_rows, has_width = len(self._work.residual), self._work.scores.shape[2]
        if rows > has_rows or width > has_width:
            if width > has_width:
                # A sequence grows with every step. And rows of scores must not lie whole pages apart, where a cache has
                # the same few places for all of them.
                width = 2 * width // LANES * LANES + LANES
            self._work = self._make_workspace(max(rows, has_rows), max(width, has_width))
        return self._work

    def logit_arrays(self, rows: int) -> LogitArrays:
        """Room for the logits of so many rows, kept where it is not extraordinarily large."""
        if rows <= len(self._logits.highest):
            return self._logits
        padded = self.weights.lm_head.bias.shape[1]
        logits = LogitArrays(np.empty((rows, padded), np.float32), np.empty(rows, np.float32), np.empty(rows, np.int64))
        if rows <= _KEPT_LOGITS:
            self._logits = logits
        return logits

    def _make_workspace(self, rows: int, width: int) -> Workspace:
        config, heads = self.config, self._heads
        widest = (config.hidden_size, config.intermediate_size, heads.num_heads * heads.head_dim)
        queries = ROWS_OF_TILE * heads.num_heads // heads.num_kv_heads

        def empty(*shape: int) -> np.ndarray:
            return np.empty(shape, np.float32)

        return Workspace(
            residual=empty(rows, config.hidden_size),
            normed=empty(rows, config.hidden_size),
            qkv=empty(rows, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim),
            attended=empty(rows, heads.num_heads * heads.head_dim),
            gated=empty(rows, config.intermediate_size),
            delta=empty(rows, config.hidden_size),
            quantised=Quantised(np.empty(rows * max(widest) if self._int8 else 0, np.int16), empty(rows)),
            queries=empty(self._num_threads, queries * heads.head_dim),
            scores=empty(self._num_threads, queries, width),
            seconds=self._seconds,
        )


def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array of zeros in large pages where the system has them: a step reads all over it, and each page's address has
    to be looked up."""
    size = max(1, math.prod(shape) * dtype.itemsize)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape)


def step_arrays(step: StepInput) -> StepArrays:
    """What the kernels read of a step."""
    rows = np.arange(step.num_tokens)
    first = np.searchsorted(step.sequences, step.sequences)  # row of each row's sequence
    return StepArrays(
        token_ids=step.token_ids,
        positions=step.positions,
        slots=step.slots,
        sequences=step.sequences,
        starts=step.context_start,
        ends=step.context_end,
        tables=step.block_tables,
        logit_rows=step.logit_rows,
        tiles=np.append(rows[(rows - first) % ROWS_OF_TILE == 0], step.num_tokens),
    )
