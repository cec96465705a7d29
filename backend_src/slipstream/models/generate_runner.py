"""The executor `transformers`: what people run today, `model.generate()`, in place of this project's own model code.

Scheduler, sampler, stop rules and doors are the same, so that what a comparison shows is the executor's difference.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from slipstream.batchers.lockstep import PADDING_TOKEN
from slipstream.config import EngineConfig, usable_threads
from slipstream.engine.batch import Batch, Chunk, StepOutput
from slipstream.engine.request import FINISH_LENGTH, Request, SamplingParams
from slipstream.engine.sampler import Logits
from slipstream.errors import OutOfMemory
from slipstream.models.linear import compute_dtype
from slipstream.models.runner import choose_device, choose_tokens, fit_context, fit_pool, run_within_memory
from slipstream.models.stepped_generate import SteppedGenerate
from slipstream.models.weights import ModelConfig

log = logging.getLogger(__name__)

_DEFAULT_WEIGHTS = {"cpu": "fp32", "cuda": "bf16"}


class GenerateRunner:
    """Runs lock-step batches, each group in one call of `generate` that a step lets go on by one token.

    A finished row is fed the padding token, as `generate` does by itself with sequences that have ended. The call ends
    with its group: a moment after no request of it is left, and at the latest when the next one starts.

    Blocks are counted by this model's KV bytes, so that the scheduler admits what `kv_cache_bytes` holds; but
    transformers allocates as it likes, its cache growing by a copy of itself in every step. Attention is its default
    (torch's scaled_dot_product_attention). Prompts cannot be scored: `generate` computes only their last logits, and
    the doors of lock-step batchers refuse `prompt_logprobs`.
    """

    batch_invariant = False

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        """Load weights, and run a short group: it is now that one finds out what transformers cannot do.

        Raises:
            ConfigError: a configuration that the model or the device cannot serve.
        """
        self.device_name = choose_device(config.device)
        storage = _DEFAULT_WEIGHTS[self.device_name] if config.weights == "auto" else config.weights
        model_config = ModelConfig.from_folder(folder)
        self.max_model_len = fit_context(config, model_config)
        self.vocab_size = model_config.vocab_size
        self.eos_token_ids = model_config.eos_token_ids
        self.token_budget = config.max_num_seqs * self.max_model_len  # a group is prefilled in one piece
        dtype = compute_dtype(storage)
        keys_and_values = 2 * model_config.num_layers * model_config.num_kv_heads * model_config.head_dim
        self.num_blocks = fit_pool(config, keys_and_values * dtype.itemsize)
        if self.device_name == "cpu":
            torch.set_num_threads(config.threads or usable_threads())
        transformers_logging.disable_progress_bar()
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, local_files_only=True, trust_remote_code=False
        )
        self.model = model.to(self.device_name)
        # Sampling is not its business, whatever the folder's generation_config.json says.
        self.model.generation_config = GenerationConfig()
        self._group: SteppedGenerate | None = None
        self._warm_up()
        log.info(
            "%s on %s by generate() of transformers, %s weights, %d blocks of %d tokens",
            folder.name, self.device_name, storage, self.num_blocks, config.block_size,
        )  # fmt: skip

    def _warm_up(self) -> None:
        """A prefill and a step of one token."""
        request = Request((b"warm-up", 0), [0] * 2, SamplingParams(max_tokens=2, temperature=0.0), 0.0)
        self.run(Batch([Chunk(request, request.token_ids, 0, sample=True)]))
        self.run(Batch([Chunk(request, [0], 2, sample=True)]))
        request.finish(FINISH_LENGTH, 0.0)
        self._end_group()

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """See Runner.copy_blocks; lock-step batches share no blocks.

        Raises:
            NotImplementedError: always; generate() has no blocks.
        """
        raise NotImplementedError(f"generate() has no KV blocks to copy: {copies}")

    def run(self, batch: Batch) -> StepOutput:
        """See Runner.run; but the rows of a group stay together.

        Raises:
            MemoryError: the device has not enough for it.
            Exception: what else generate() has raised.
        """
        try:
            return run_within_memory(lambda: choose_tokens(self.logits(batch), batch), self.device_name)
        except OutOfMemory as error:
            group = f"a group of {len(batch.chunks)} rows"
            raise MemoryError(f"no memory for {group} in generate(), which cannot be split ({error})") from None

    def logits(self, batch: Batch) -> Logits:
        """The logits after the last token of each row; a batch of prompts starts the next group."""
        if batch.chunks[0].start == 0:
            self._end_group()
            self._group = self._start_group(batch)
        else:
            assert self._group is not None
            self._group.advance([chunk.token_ids[0] for chunk in batch.chunks])
        return Logits.of(self._group.logits())

    def _start_group(self, batch: Batch) -> SteppedGenerate:
        requests = [chunk.request for chunk in batch.chunks]
        lengths = [(request.padding, request.num_prompt_tokens) for request in requests]
        return SteppedGenerate(
            self.model,
            torch.tensor([chunk.token_ids for chunk in batch.chunks], device=self.device_name),
            torch.tensor([[0] * padding + [1] * prompt for padding, prompt in lengths], device=self.device_name),
            pad_token_id=PADDING_TOKEN,
            max_new_tokens=max(request.sampling.max_tokens for request in requests),
            is_wanted=lambda: not all(request.finished for request in requests),
        )

    def _end_group(self) -> None:
        if self._group is not None:
            self._group.end()
            self._group = None
