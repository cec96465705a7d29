"""Decoders of the Llama family on flat tokens: fused projections, paged KV cache, no padding between sequences.

One forward pass takes the rows of a whole batch, prompt chunks and single decode tokens alike.
"""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from slipstream.models.linear import Linear, compute_dtype, make_linear, pad_rows
from slipstream.models.rope import rotary_tables
from slipstream.models.step_input import StepInput
from slipstream.models.weights import Checkpoint, ModelConfig


class Kernels(Protocol):
    """What lies between the matmuls, on one kind of device; `kernels/cpu.py` says what each computes."""

    device: torch.device

    def kv_bytes_per_token(self) -> int: ...
    def allocate_cache(self, num_blocks: int) -> Any: ...
    def copy_blocks(self, cache: Any, sources: list[int], targets: list[int]) -> None: ...
    def prepare(self, step: StepInput) -> Any: ...
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, num_tokens: int) -> torch.Tensor: ...
    def add_rms_norm(
        self, delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, num_tokens: int
    ) -> torch.Tensor: ...
    def head_norm(self, qkv: torch.Tensor, first: int, count: int, weight: torch.Tensor, epsilon: float) -> None: ...
    def rotate_and_store(
        self, qkv: torch.Tensor, cache: Any, step: Any, cos: torch.Tensor, sin: torch.Tensor
    ) -> None: ...
    def attention(self, qkv: torch.Tensor, cache: Any, step: Any) -> torch.Tensor: ...
    def silu_mul(self, gate_up: torch.Tensor, num_tokens: int) -> torch.Tensor: ...


@dataclass(slots=True)
class Layer:
    """One decoder layer's weights and its part of the KV cache."""

    input_norm: torch.Tensor  # [hidden]
    qkv: Linear  # hidden -> (num_heads + 2 * num_kv_heads) * head_dim
    query_norm: torch.Tensor | None  # [head_dim], Qwen3
    key_norm: torch.Tensor | None  # [head_dim]
    output: Linear  # num_heads * head_dim -> hidden
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: Linear  # hidden -> 2 * intermediate
    down: Linear  # intermediate -> hidden
    cache: Any = None


class LlamaModel:
    """Weights of one model and its forward pass."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, kernels: Kernels, storage: str, max_model_len: int
    ) -> None:
        self.config = config
        self._kernels = kernels
        self._storage = storage
        device, dtype = kernels.device, compute_dtype(storage)
        embedding = checkpoint.get("model.embed_tokens.weight")
        head = embedding if config.tie_word_embeddings else checkpoint.get("lm_head.weight")
        # Looked up by row, so its storage costs memory, not time.
        self._embedding = embedding.to(device, torch.float16 if storage == "fp16" else dtype)  # [vocab, hidden]
        self._final_norm = checkpoint.get("model.norm.weight").to(device, dtype)
        with warnings.catch_warnings(), ThreadPoolExecutor() as pool:  # packing is most of a start, on one core each
            warnings.simplefilter("ignore")  # torch announces that its quantized namespace will move
            lm_head = pool.submit(make_linear, head, None, storage, device)
            layers = pool.map(lambda index: self._load_layer(checkpoint, index, dtype), range(config.num_layers))
            self.lm_head, self.layers = lm_head.result(), list(layers)
        self._cos, self._sin = rotary_tables(config.rope, config.head_dim, max_model_len, device)

    def allocate_cache(self, num_blocks: int) -> None:
        for layer in self.layers:
            layer.cache = self._kernels.allocate_cache(num_blocks)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy what lies in blocks of the cache to other blocks, as (from, to)."""
        sources, targets = zip(*copies, strict=True)
        for layer in self.layers:
            self._kernels.copy_blocks(layer.cache, list(sources), list(targets))

    def linears(self) -> list[tuple[Linear, int]]:
        """Every matmul of a step in order, each with its number of input features."""
        config = self.config
        width = config.num_heads * config.head_dim
        matmuls: list[tuple[Linear, int]] = []
        for layer in self.layers:
            matmuls += [
                (layer.qkv, config.hidden_size),
                (layer.output, width),
                (layer.gate_up, config.hidden_size),
                (layer.down, config.intermediate_size),
            ]
        return [*matmuls, (self.lm_head, config.hidden_size)]

    def forward(self, step: StepInput) -> torch.Tensor:
        """Put a batch's tokens through the model and return the logits of its `logit_rows`, [num_rows, vocab]."""
        kernels, config = self._kernels, self.config
        num_tokens, epsilon = step.num_tokens, config.rms_norm_eps
        # A lock-step row that has ended is computed on, in the end past the context; its results serve nobody.
        np.minimum(step.positions, len(self._cos) - 1, out=step.positions)
        arrays = kernels.prepare(step)
        residual = self._embed(step.token_ids)
        delta: torch.Tensor | None = None
        for layer in self.layers:
            if delta is None:
                x = kernels.rms_norm(residual, layer.input_norm, epsilon, num_tokens)
            else:
                x = kernels.add_rms_norm(delta, residual, layer.input_norm, epsilon, num_tokens)
            qkv = layer.qkv(x)
            if layer.query_norm is not None and layer.key_norm is not None:
                kernels.head_norm(qkv, 0, config.num_heads, layer.query_norm, epsilon)
                kernels.head_norm(qkv, config.num_heads, config.num_kv_heads, layer.key_norm, epsilon)
            kernels.rotate_and_store(qkv, layer.cache, arrays, self._cos, self._sin)
            delta = layer.output(kernels.attention(qkv, layer.cache, arrays))
            x = kernels.add_rms_norm(delta, residual, layer.mlp_norm, epsilon, num_tokens)
            delta = layer.down(kernels.silu_mul(layer.gate_up(x), num_tokens))
        assert delta is not None
        return self._logits(residual, delta, step)

    def _embed(self, token_ids: Any) -> torch.Tensor:
        """[num_tokens] ids -> [padded rows, hidden]; padding rows are zero."""
        rows = pad_rows(len(token_ids), self._storage)
        residual = torch.zeros(
            rows, self.config.hidden_size, device=self._kernels.device, dtype=compute_dtype(self._storage)
        )
        ids = torch.from_numpy(token_ids).to(self._kernels.device)
        residual[: len(token_ids)] = self._embedding[ids]
        return residual

    def _logits(self, residual: torch.Tensor, delta: torch.Tensor, step: StepInput) -> torch.Tensor:
        """The final norm and the LM head, for the rows alone whose logits are asked for."""
        num_rows = len(step.logit_rows)
        rows = torch.zeros(pad_rows(num_rows, self._storage), dtype=torch.long)
        rows[:num_rows] = torch.from_numpy(step.logit_rows)
        rows = rows.to(residual.device)
        x = self._kernels.add_rms_norm(
            delta[rows], residual[rows], self._final_norm, self.config.rms_norm_eps, len(rows)
        )
        return self.lm_head(x)[:num_rows]

    def _load_layer(self, checkpoint: Checkpoint, index: int, dtype: torch.dtype) -> Layer:
        prefix = f"model.layers.{index}"
        device = self._kernels.device

        def linear(*projections: str) -> Linear:
            names = [f"{prefix}.{projection}" for projection in projections]
            biased = f"{names[0]}.bias" in checkpoint
            return make_linear(
                checkpoint.fused([f"{name}.weight" for name in names]),
                checkpoint.fused([f"{name}.bias" for name in names]).float() if biased else None,
                self._storage,
                device,
            )

        def vector(name: str) -> torch.Tensor:
            return checkpoint.get(f"{prefix}.{name}.weight").to(device, dtype)

        has_head_norms = f"{prefix}.self_attn.q_norm.weight" in checkpoint
        return Layer(
            input_norm=vector("input_layernorm"),
            qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            query_norm=vector("self_attn.q_norm") if has_head_norms else None,
            key_norm=vector("self_attn.k_norm") if has_head_norms else None,
            output=linear("self_attn.o_proj"),
            mlp_norm=vector("post_attention_layernorm"),
            gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
            down=linear("mlp.down_proj"),
        )
