"""The matmul of a layer, by how its weights are stored."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from slipstream.errors import ConfigError

DEFAULT_WEIGHTS = {"cpu": "fp16", "cuda": "bf16"}


class Linear(Protocol):
    """x [rows, in_features] -> [rows, out_features] in x's dtype."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class PackedFp16Linear:
    """FBGEMM's packed fp16 weights with fp32 activations and accumulation (CPU).

    Its kernel takes up to six rows at a time. A row's result is the same bits whatever the batch, except where the last
    group has one or two rows: `pad_rows` avoids those counts.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float().contiguous(), bias)
        self._multiply = torch.ops.quantized.linear_dynamic_fp16

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, self._packed)


class DenseLinear:
    """torch's own matmul in the weights' dtype; how rows influence each other's rounding is up to the library below."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None, storage: str, device: torch.device) -> Linear:
    """A matmul for a weight [out_features, in_features], stored as `fp16` (packed), `fp32` or `bf16`.

    Raises:
        ConfigError: a storage that the device does not have.
    """
    if storage == "fp16":
        if device.type != "cpu":
            raise ConfigError("weights is 'fp16', which is the packed CPU storage; on cuda use 'bf16' or 'fp32'")
        return PackedFp16Linear(weight, bias)
    dtype = compute_dtype(storage)
    return DenseLinear(weight.to(device, dtype), None if bias is None else bias.to(device, dtype))


def compute_dtype(storage: str) -> torch.dtype:
    """The dtype of activations beside weights of this storage."""
    return torch.bfloat16 if storage == "bf16" else torch.float32


def pad_rows(num_rows: int, storage: str) -> int:
    """The row count to compute so that each row's bits do not depend on the others (see PackedFp16Linear)."""
    if storage != "fp16":
        return num_rows
    last_group = num_rows % 6
    return num_rows + 3 - last_group if last_group in (1, 2) else num_rows


def is_batch_invariant(linear: Linear, in_features: int) -> bool:
    """Whether this matmul gives a row the same bits at every padded row count: tried, not assumed."""
    x = torch.randn(48, in_features, generator=torch.Generator().manual_seed(0))
    whole = linear(x)
    counts = sorted({pad_rows(rows, "fp16") for rows in (*range(1, 13), 22, 47)})  # each size of a last group
    return all(torch.equal(linear(x[-rows:]), whole[-rows:]) for rows in counts)
