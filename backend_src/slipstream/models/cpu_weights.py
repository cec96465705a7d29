"""A checkpoint's weights as the CPU's kernels read them, packed once and kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from slipstream.errors import ConfigError
from slipstream.models.kernels.cpu_matmul import MOST_WEIGHT, Matrix
from slipstream.models.kernels.cpu_step import Weights
from slipstream.models.kernels.cpu_tile import LANES, pack_panels
from slipstream.models.weights import Checkpoint, ModelConfig

_COLUMNS_AT_ONCE = 1024  # quantised: what lies between takes memory too
_STORED = {"fp16": np.float16, "fp32": np.float32}


def pack_weights(config: ModelConfig, checkpoint: Checkpoint, storage: str) -> Weights:
    """All weights of a model, its matrices stored as `fp16`, `fp32` or `int8` (a scale for each column).

    Raises:
        ConfigError: a width that the kernels do not compute.
    """
    for name in ("hidden_size", "intermediate_size", "head_dim"):
        if getattr(config, name) % LANES:
            raise ConfigError(f"{name} is {getattr(config, name)}; the CPU's kernels compute multiples of {LANES}")
    layers = range(config.num_layers)

    def floats(name: str) -> np.ndarray:
        return checkpoint.get(name).float().numpy().copy()  # what is not copied keeps the whole file mapped

    def vectors(name: str) -> np.ndarray:
        return np.stack([floats(f"model.layers.{layer}.{name}.weight") for layer in layers])

    def head_norm(name: str) -> np.ndarray:
        has = f"model.layers.0.self_attn.{name}.weight" in checkpoint
        return vectors(f"self_attn.{name}") if has else np.zeros((config.num_layers, 0), np.float32)

    def matrix(*projections: str, arrange: Callable[[Any], Any] = lambda weight: weight) -> Matrix:
        """Projections of the same input as one matrix; `arrange` orders its rows."""
        found = None
        for layer in layers:
            names = [f"model.layers.{layer}.{projection}" for projection in projections]
            weight = arrange(checkpoint.fused([f"{name}.weight" for name in names]))
            panels, scales = pack_matrix(weight, storage)
            if found is None:  # all layers' at once, so that none is ever there twice
                found = Matrix(
                    np.empty((len(layers), *panels.shape), panels.dtype),
                    np.zeros((len(layers), len(weight)), np.float32),
                    np.empty((len(layers), *scales.shape), np.float32),
                )
            found.panels[layer], found.scales[layer] = panels, scales
            if f"{names[0]}.bias" in checkpoint:
                found.bias[layer] = arrange(checkpoint.fused([f"{name}.bias" for name in names]).float()).numpy()
        assert found is not None
        return found

    # Before all else, while there is room for a float32 copy of the largest of them.
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    head_panels, head_scales = (array[None] for array in pack_matrix(checkpoint.get(head), storage))
    embedding = _as_stored(checkpoint.get("model.embed_tokens.weight"), "fp16" if storage == "int8" else storage)
    return Weights(
        embedding=embedding,
        input_norm=vectors("input_layernorm"),
        qkv=matrix("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        query_norm=head_norm("q_norm"),
        key_norm=head_norm("k_norm"),
        output=matrix("self_attn.o_proj"),
        mlp_norm=vectors("post_attention_layernorm"),
        gate_up=matrix("mlp.gate_proj", "mlp.up_proj", arrange=_alternate),
        down=matrix("mlp.down_proj"),
        final_norm=floats("model.norm.weight"),
        lm_head=Matrix(head_panels, np.zeros((1, head_panels.shape[1] * LANES), np.float32), head_scales),
    )


def pack_matrix(weight: torch.Tensor, storage: str) -> tuple[np.ndarray, np.ndarray]:
    """Panels of a weight [columns, depth], and each column's scale where it is quantised."""
    if storage != "int8":
        return pack_panels(_as_stored(weight, storage)), np.zeros(0, np.float32)
    whole = np.empty(weight.shape, np.int8)
    scales = np.zeros(-(-len(weight) // LANES) * LANES, np.float32)
    for start in range(0, len(weight), _COLUMNS_AT_ONCE):
        part = weight[start : start + _COLUMNS_AT_ONCE].float()
        scale = (part.abs().amax(dim=1) / MOST_WEIGHT).clamp(min=1e-30)
        whole[start : start + len(part)] = (part / scale[:, None]).round().to(torch.int8).numpy()
        scales[start : start + len(part)] = scale.numpy()
    return pack_panels(whole), scales


def _as_stored(tensor: torch.Tensor, storage: str) -> np.ndarray:
    array: np.ndarray = tensor.float().numpy().astype(_STORED[storage])
    return array.view(np.uint16) if array.dtype == np.float16 else array


def _alternate(fused: torch.Tensor) -> torch.Tensor:
    """Sixteen rows of the first half, sixteen of the second, and so on."""
    return fused.unflatten(0, (2, -1, LANES)).transpose(0, 1).flatten(0, 2)
