"""Decoders of the Llama family on the CPU: weights, KV cache and workspace around the compiled step."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from slipstream.engine.sampler import Logits
from slipstream.errors import ConfigError
from slipstream.models.kernels.cpu_attention import ROWS_OF_TILE
from slipstream.models.kernels.cpu_step import PARTS, Cache, Heads, LogitArrays, StepArrays, Weights, Workspace, run_step
from slipstream.models.kernels.cpu_matmul import Quantised
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
        self._weights = weights
        self._block_size = block_size
        self._kv_dtype = np.dtype(np.uint16 if kv_cache_dtype == "fp16" else np.float32)
        self._heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        cos, sin = rotary_tables(config.rope, config.head_dim, max_model_len, torch.device("cpu"))
        self._cos, self._sin = cos.numpy(), sin.numpy()
        self._int8 = weights.qkv.panels.dtype == np.int8
        self._teams = [make_team(1), make_team(threads)]
        self._others = ThreadPoolExecutor(max_workers=max(threads - 1, 1), thread_name_prefix="step")
        self._num_threads = threads
        self._num_weights = sum(matrix.panels.size for matrix in self._matrices())
        self._cache = Cache(np.zeros(0), np.zeros(0))
        self._work = self._make_workspace(rows=1, width=1)
        self._logits = self._make_logits(1)

    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.config.num_layers * self.config.num_kv_heads * self.config.head_dim * self._kv_dtype.itemsize

    def allocate_cache(self, num_blocks: int) -> None:
        """Pages of memory are taken when first written."""
        config = self.config
        shape = (config.num_layers, num_blocks, config.num_kv_heads)
        self._cache = Cache(
            np.zeros((*shape, self._block_size // LANES, config.head_dim, LANES), self._kv_dtype),
            np.zeros((*shape, config.head_dim // LANES, self._block_size, LANES), self._kv_dtype),
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
        arrays = step_arrays(step)
        width = int(step.context_end.max()) + 2 * self._block_size
        if num_tokens > len(self._work.residual) or width > self._work.scores.shape[2]:
            self._work = self._make_workspace(
                max(num_tokens, len(self._work.residual)), max(width, self._work.scores.shape[2])
            )
        logits = self._logits
        if num_logits > len(logits.highest):
            logits = self._make_logits(num_logits)
            if num_logits <= _KEPT_LOGITS:
                self._logits = logits
        parallel = self._num_threads > 1 and num_tokens * self._num_weights >= _SERIAL_PRODUCTS
        arguments = (
            self._teams[parallel], self._heads, np.float32(self.config.rms_norm_eps), self._weights,
            self._cos, self._sin, self._cache, arrays, self._work, logits,
        )  # fmt: skip
        others = [self._others.submit(run_step, n, *arguments) for n in range(1, self._num_threads) if parallel]
        run_step(0, *arguments)
        for other in others:
            other.result()
        values, highest, token_ids = (torch.from_numpy(array[:num_logits]) for array in logits)
        return Logits(values[:, : self.config.vocab_size], highest, token_ids)

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
            seconds=np.zeros((self._num_threads, len(PARTS) + 1)),
        )

    def _make_logits(self, rows: int) -> LogitArrays:
        padded = self._weights.lm_head.bias.shape[1]
        return LogitArrays(np.empty((rows, padded), np.float32), np.empty(rows, np.float32), np.empty(rows, np.int64))

    def _matrices(self):
        w = self._weights
        return (w.qkv, w.output, w.gate_up, w.down, w.lm_head)


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


def usable_threads() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))
