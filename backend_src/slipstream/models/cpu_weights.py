"""A checkpoint's weights as the CPU's kernels read them, packed once and kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from slipstream.errors import ConfigError
from slipstream.models.kernels.cpu_matmul import Matrix
from slipstream.models.kernels.cpu_step import Weights
from slipstream.models.kernels.cpu_tile import LANES, pack_panels
from slipstream.models.weights import Checkpoint, ModelConfig

_STORED = {"fp16": np.float16, "fp32": np.float32}


def pack_weights(config: ModelConfig, checkpoint: Checkpoint, storage: str) -> Weights:
    """All weights of a model, its matrices stored as `fp16` or `fp32`.

    Raises:
        ConfigError: a width that the kernels do not compute.
    """
    for name in ("hidden_size", "intermediate_size", "head_dim"):
        if getattr(config, name) % LANES:
            raise ConfigError(f"{name} is {getattr(config, name)}; the CPU's kernels compute multiples of {LANES}")
    layers = range(config.num_layers)

    def floats(name: str) -> np.ndarray:
        return checkpoint.get(name).float().numpy()

    def stored(tensor: torch.Tensor) -> np.ndarray:
        array: np.ndarray = tensor.float().numpy().astype(_STORED[storage])
        return array.view(np.uint16) if array.dtype == np.float16 else array

    def vectors(name: str) -> np.ndarray:
        return np.stack([floats(f"model.layers.{layer}.{name}.weight") for layer in layers])

    def head_norm(name: str) -> np.ndarray:
        has = f"model.layers.0.self_attn.{name}.weight" in checkpoint
        return vectors(f"self_attn.{name}") if has else np.zeros((config.num_layers, 0), np.float32)

    def matrix(*projections: str, arrange: Callable[[Any], Any] = lambda weight: weight) -> Matrix:
        """Projections of the same input as one matrix; `arrange` orders its rows."""
        panels: list[np.ndarray] = []
        biases = []
        for layer in layers:
            names = [f"model.layers.{layer}.{projection}" for projection in projections]
            weight = arrange(checkpoint.fused([f"{name}.weight" for name in names]))
            panels.append(pack_panels(stored(weight)))
            biased = f"{names[0]}.bias" in checkpoint
            bias = checkpoint.fused([f"{name}.bias" for name in names]).float() if biased else torch.zeros(len(weight))
            biases.append(arrange(bias).numpy() if biased else bias.numpy())
        return Matrix(np.stack(panels), np.stack(biases))

    embedding = checkpoint.get("model.embed_tokens.weight")
    head = embedding if config.tie_word_embeddings else checkpoint.get("lm_head.weight")
    head_panels = pack_panels(stored(head))[None]
    return Weights(
        embedding=np.ascontiguousarray(stored(embedding)),
        input_norm=vectors("input_layernorm"),
        qkv=matrix("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        query_norm=head_norm("q_norm"),
        key_norm=head_norm("k_norm"),
        output=matrix("self_attn.o_proj"),
        mlp_norm=vectors("post_attention_layernorm"),
        gate_up=matrix("mlp.gate_proj", "mlp.up_proj", arrange=_alternate),
        down=matrix("mlp.down_proj"),
        final_norm=floats("model.norm.weight"),
        lm_head=Matrix(head_panels, np.zeros((1, head_panels.shape[1] * LANES), np.float32)),
    )


def _alternate(fused: torch.Tensor) -> torch.Tensor:
    """Sixteen rows of the first half, sixteen of the second, and so on."""
    return fused.unflatten(0, (2, -1, LANES)).transpose(0, 1).flatten(0, 2)
