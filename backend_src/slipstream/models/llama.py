"""Decoders of the Llama family in torch, on flat tokens: fused projections, paged KV cache, no padding.

One forward pass takes the rows of a whole batch, prompt chunks and single decode tokens alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slipstream.engine.sampler import Logits
from slipstream.models.kernels.torch_ops import TorchKernels
from slipstream.models.linear import Linear, compute_dtype
from slipstream.models.rope import rotary_tables
from slipstream.models.step_input import StepInput
from slipstream.models.weights import Checkpoint, ModelConfig


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
    """Weights of one model and its forward pass, where torch computes: on CUDA, and in bf16 on a CPU.

    How rows influence each other's rounding is up to the libraries below torch.
    """

    batch_invariant = False

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, kernels: TorchKernels, storage: str, max_model_len: int
    ) -> None:
        self.config = config
        self._kernels = kernels
        device, dtype = kernels.device, compute_dtype(storage)
        self._dtype = dtype
        embedding = checkpoint.get("model.embed_tokens.weight")
        head = embedding if config.tie_word_embeddings else checkpoint.get("lm_head.weight")
        self._embedding = embedding.to(device, dtype)  # [vocab, hidden]
        self._final_norm = checkpoint.get("model.norm.weight").to(device, dtype)
        self.lm_head = Linear(head.to(device, dtype), None)
        self.layers = [self._load_layer(checkpoint, index) for index in range(config.num_layers)]
        self._cos, self._sin = rotary_tables(config.rope, config.head_dim, max_model_len, device)

    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return self._kernels.kv_bytes_per_token() * self.config.num_layers

    def allocate_cache(self, num_blocks: int) -> None:
        for layer in self.layers:
            layer.cache = self._kernels.allocate_cache(num_blocks)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy what lies in blocks of the cache to other blocks, as (from, to)."""
        sources, targets = zip(*copies, strict=True)
        for layer in self.layers:
            self._kernels.copy_blocks(layer.cache, list(sources), list(targets))

    def forward(self, step: StepInput) -> Logits:
        """Put a batch's tokens through the model: the logits of its `logit_rows`."""
        kernels, config = self._kernels, self.config
        epsilon = config.rms_norm_eps
        # A lock-step row that has ended is computed on, in the end past the context; its results serve nobody.
        np.minimum(step.positions, len(self._cos) - 1, out=step.positions)
        arrays = kernels.prepare(step)
        residual = self._embed(step.token_ids)
        delta: torch.Tensor | None = None
        for layer in self.layers:
            if delta is None:
                x = kernels.rms_norm(residual, layer.input_norm, epsilon)
            else:
                x = kernels.add_rms_norm(delta, residual, layer.input_norm, epsilon)
            qkv = layer.qkv(x)
            if layer.query_norm is not None and layer.key_norm is not None:
                kernels.head_norm(qkv, 0, config.num_heads, layer.query_norm, epsilon)
                kernels.head_norm(qkv, config.num_heads, config.num_kv_heads, layer.key_norm, epsilon)
            kernels.rotate_and_store(qkv, layer.cache, arrays, self._cos, self._sin)
            delta = layer.output(kernels.attention(qkv, layer.cache, arrays))
            x = kernels.add_rms_norm(delta, residual, layer.mlp_norm, epsilon)
            delta = layer.down(kernels.silu_mul(layer.gate_up(x)))
        assert delta is not None
        return Logits.of(self._logits(residual, delta, step))

    def _embed(self, token_ids: Any) -> torch.Tensor:
        """[num_tokens] ids -> [num_tokens, hidden], a copy."""
        return self._embedding[torch.from_numpy(token_ids).to(self._kernels.device)]

    def _logits(self, residual: torch.Tensor, delta: torch.Tensor, step: StepInput) -> torch.Tensor:
        """The final norm and the LM head, for the rows alone whose logits are asked for."""
        rows = torch.from_numpy(step.logit_rows).to(residual.device)
        x = self._kernels.add_rms_norm(delta[rows], residual[rows], self._final_norm, self.config.rms_norm_eps)
        return self.lm_head(x)

    def _load_layer(self, checkpoint: Checkpoint, index: int) -> Layer:
        prefix = f"model.layers.{index}"
        device, dtype = self._kernels.device, self._dtype

        def linear(*projections: str) -> Linear:
            names = [f"{prefix}.{projection}" for projection in projections]
            weight = checkpoint.fused([f"{name}.weight" for name in names]).to(device, dtype)
            biased = f"{names[0]}.bias" in checkpoint
            return Linear(
                weight, checkpoint.fused([f"{name}.bias" for name in names]).to(device, dtype) if biased else None
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
