"""The matmul of a layer in torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class Linear:
    """x [rows, in_features] -> [rows, out_features] in x's dtype, which is the weights'."""

    weight: torch.Tensor  # [out_features, in_features]
    bias: torch.Tensor | None  # [out_features]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


def compute_dtype(storage: str) -> torch.dtype:
    """The dtype of torch's weights and activations for the storage `bf16` or `fp32`."""
    return torch.bfloat16 if storage == "bf16" else torch.float32
