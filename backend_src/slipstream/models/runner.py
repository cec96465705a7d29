"""The one runner under every batcher: weights, KV cache and kernels on one device; a batch in, token ids out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from slipstream.config import DEFAULT_WEIGHTS, EngineConfig, usable_threads
from slipstream.engine.batch import Batch, Chunk, StepOutput
from slipstream.engine.logprobs import score
from slipstream.engine.request import Request, SamplingParams
from slipstream.engine.sampler import Logits, sample_each
from slipstream.errors import ConfigError, OutOfMemory
from slipstream.models.linear import compute_dtype
from slipstream.models.llama import LlamaModel
from slipstream.models.step_input import StepInput
from slipstream.models.weights import Checkpoint, ModelConfig

log = logging.getLogger(__name__)

# The CPU's takes a usual prompt in one step: with 64, the 99th percentile of the time to the first token of 32 streams
# of the workload `mixed` was six times as long, with 256 twice (README, "One long prompt beside running answers").
_DEFAULT_BUDGET = {"cpu": 512, "cuda": 8192}


class Runner(Protocol):
    """What the engine needs of a model; tests script it."""

    eos_token_ids: frozenset[int]
    vocab_size: int
    max_model_len: int
    num_blocks: int
    token_budget: int
    batch_invariant: bool
    device_name: str

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy what lies in blocks of the cache to other blocks, as (from, to); no block is in two of them as `to`."""
        ...

    def run(self, batch: Batch) -> StepOutput:
        """Compute a batch. Running it again, or what of it has been split off, gives the same.

        Raises:
            OutOfMemory: the device has not enough for the whole of it.
        """
        ...


class Model(Protocol):
    """Weights, KV cache and forward pass on one kind of device."""

    batch_invariant: bool

    def kv_bytes_per_token(self) -> int: ...
    def allocate_cache(self, num_blocks: int) -> None: ...
    def copy_blocks(self, copies: list[tuple[int, int]]) -> None: ...
    def forward(self, step: StepInput) -> Logits: ...


class ModelRunner:
    """Runs a Llama-family model on a CPU or on CUDA."""

    def __init__(
        self, config: EngineConfig, folder: Path, packed: Callable[[], dict[str, np.ndarray] | None] = lambda: None
    ) -> None:
        """Load weights, allocate the pool, and run a step of each kind so that no request waits for a compiler.

        `packed` gives what has been read already of the packed weights.

        Raises:
            ConfigError: a configuration that the model or the device cannot serve.
        """
        self.device_name = choose_device(config.device)
        device = torch.device(self.device_name)
        storage = DEFAULT_WEIGHTS[self.device_name] if config.weights == "auto" else config.weights
        model_config = ModelConfig.from_folder(folder)
        self.max_model_len = fit_context(config, model_config)
        self.vocab_size = model_config.vocab_size
        self.eos_token_ids = model_config.eos_token_ids
        default_budget = max(_DEFAULT_BUDGET[self.device_name], config.max_num_seqs)  # one for each sequence at least
        self.token_budget = config.max_num_batched_tokens or default_budget
        self._block_size = config.block_size
        self.model = _make_model(config, model_config, folder, device, storage, self.max_model_len, packed)
        self.num_blocks = fit_pool(config, self.model.kv_bytes_per_token())
        with torch.inference_mode():
            self.model.allocate_cache(self.num_blocks)
        self.batch_invariant = self._warm_up() and self.model.batch_invariant
        log.info(
            "%s on %s, %s weights, %d blocks of %d tokens, batch invariant: %s",
            folder.name, self.device_name, storage, self.num_blocks, config.block_size, self.batch_invariant,
        )  # fmt: skip

    def _warm_up(self) -> bool:
        """A step with many rows and one with few, so that all is compiled; whether a row depends on no other.

        The second step computes the first one's last token again, alone and from the cache: its logits are the same
        bits where a row depends on nothing else.
        """
        num_tokens = min(32, self.max_model_len, self.num_blocks * self._block_size)
        request = Request((b"warm-up", 0), list(range(num_tokens)), SamplingParams(max_tokens=1, temperature=0.0), 0.0)
        request.block_table = list(range(-(-num_tokens // self._block_size)))
        logits = []
        for start in (0, num_tokens - 1):
            batch = Batch([Chunk(request, request.token_ids[start:], start, sample=True)])
            with torch.inference_mode():
                found = self.logits(batch)
                choose_tokens(found, batch)
                logits.append(found.values.clone())
        return torch.equal(*logits)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """See Runner.copy_blocks."""
        with torch.inference_mode():
            self.model.copy_blocks(copies)

    def run(self, batch: Batch) -> StepOutput:
        """See Runner.run."""
        return run_within_memory(lambda: choose_tokens(self.logits(batch), batch), self.device_name)

    def logits(self, batch: Batch) -> Logits:
        """The logits of the sampled chunks' last rows, and then of the rows that score a prompt."""
        return self.model.forward(StepInput.from_batch(batch, self._block_size))


def make_runner(
    config: EngineConfig, folder: Path, packed: Callable[[], dict[str, np.ndarray] | None] = lambda: None
) -> Runner:
    """The configured executor; see ModelRunner.

    Raises:
        ConfigError: a configuration that the model or the device cannot serve.
    """
    if config.executor == "transformers":
        from slipstream.models.generate_runner import GenerateRunner

        return GenerateRunner(config, folder)
    return ModelRunner(config, folder, packed)


def choose_tokens(logits: Logits, batch: Batch) -> StepOutput:
    """Sample each sampled chunk from its row of `logits`; the rows that score prompts come behind."""
    requests = [chunk.request for chunk in batch.sampled]
    output = StepOutput(sample_each(logits[: len(requests)], requests))
    _score_tokens(logits.values, requests, output)
    _score_prompts(logits.values[len(requests) :], batch, output)
    return output


def _score_tokens(logits: torch.Tensor, requests: list[Request], output: StepOutput) -> None:
    """Log-probabilities of the tokens that were chosen, for those who want them."""
    wanted = {
        row: request.sampling.logprobs
        for row, request in enumerate(requests)
        if request.sampling.logprobs is not None and output.token_ids[row] >= 0
    }
    if wanted:
        rows = list(wanted)
        scored = score(logits[rows], [output.token_ids[row] for row in rows], list(wanted.values()))
        output.logprobs = [(requests[row], scores) for row, scores in zip(rows, scored, strict=True)]


def _score_prompts(logits: torch.Tensor, batch: Batch, output: StepOutput) -> None:
    """Log-probabilities of prompt tokens, from the rows before them."""
    start = 0
    for chunk in batch.chunks:
        ids = chunk.scored_ids
        if ids:
            wanted = chunk.request.sampling.prompt_logprobs
            assert wanted is not None
            scored = score(logits[start : start + len(ids)], ids, [wanted] * len(ids))
            output.prompt_logprobs.append((chunk, scored))
            start += len(ids)


def fit_context(config: EngineConfig, model: ModelConfig) -> int:
    """The longest prompt plus answer in tokens."""
    if config.max_model_len > model.max_model_len:
        raise ConfigError(f"max_model_len is {config.max_model_len}; the model allows at most {model.max_model_len}")
    return config.max_model_len or model.max_model_len


def fit_pool(config: EngineConfig, token_bytes: int) -> int:
    """The number of KV blocks, where the keys and values of a token take `token_bytes` in all layers."""
    block_bytes = config.block_size * token_bytes
    if config.kv_cache_bytes < block_bytes:
        raise ConfigError(f"kv_cache_bytes is {config.kv_cache_bytes}; one block of this model takes {block_bytes}")
    return config.kv_cache_bytes // block_bytes


def run_within_memory(step: Callable[[], StepOutput], device_name: str) -> StepOutput:
    """Compute a step; where it fails for want of memory, give back what it had allocated.

    Raises:
        OutOfMemory: the device has not enough for the whole of it.
    """
    try:
        with torch.inference_mode():
            return step()
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {error}"
    # Not before the error is gone, which holds what the step had allocated.
    if device_name == "cuda":
        torch.cuda.empty_cache()
    raise OutOfMemory(reason)


def _is_out_of_memory(error: Exception) -> bool:
    """torch has a class of its own for CUDA; its CPU allocator raises a RuntimeError that says so."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def choose_device(device: str) -> str:
    """`cpu` or `cuda`."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError("device is 'cuda'; torch sees no CUDA device here (use 'cpu' or 'auto')")
    return "cuda" if available and device != "cpu" else "cpu"


def _make_model(
    config: EngineConfig,
    model: ModelConfig,
    folder: Path,
    device: torch.device,
    storage: str,
    max_model_len: int,
    packed: Callable[[], dict[str, np.ndarray] | None],
) -> Model:
    if device.type != "cpu" and storage in ("fp16", "int8"):
        raise ConfigError(f"weights is {storage!r}, which is packed for a CPU; on cuda use 'bf16' or 'fp32'")
    if device.type == "cpu" and storage != "bf16":
        from slipstream.models.cpu_llama import CpuLlama
        from slipstream.models.packed_store import load_weights

        threads = config.threads or usable_threads()
        torch.set_num_threads(threads)
        weights = load_weights(model, folder, storage, packed())
        kv_cache_dtype = config.kv_cache_dtype
        if kv_cache_dtype == "auto":
            kv_cache_dtype = "fp32" if storage == "fp32" else "fp16"
        return CpuLlama(model, weights, max_model_len, config.block_size, threads, kv_cache_dtype)
    if config.kv_cache_dtype != "auto":
        raise ConfigError(
            f"kv_cache_dtype is {config.kv_cache_dtype!r}; with {storage} weights on {device.type} only auto is allowed"
        )
    from slipstream.models.kernels.torch_ops import TorchKernels

    heads = (model.num_heads, model.num_kv_heads, model.head_dim, config.block_size)
    kernels = TorchKernels(*heads, device=device, dtype=compute_dtype(storage))
    with torch.inference_mode():
        return LlamaModel(model, Checkpoint(folder), kernels, storage, max_model_len)
