"""What lies between the matmuls, in plain torch operations: gather and scaled-dot-product attention.

Not the fastest way on a GPU, but the whole engine runs on it, and it is the dense oracle of the paged CPU kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from slipstream.models.step_input import StepInput


@dataclass(slots=True)
class TorchKVCache:
    """Keys and values of one layer, one row a slot."""

    keys: torch.Tensor  # [num_blocks * block_size, num_kv_heads, head_dim]
    values: torch.Tensor  # [num_blocks * block_size, num_kv_heads, head_dim]


@dataclass(slots=True)
class DeviceStep:
    """A step's arrays on the device, with each sequence's context gathered once for all layers.

    Queries are laid out [num_sequences, most rows of one] for one batched attention; `row_of` and `place_of` map back.
    """

    positions: torch.Tensor  # [num_tokens]
    slots: torch.Tensor  # [num_tokens]
    row_of: torch.Tensor  # [num_tokens] sequence of a row
    place_of: torch.Tensor  # [num_tokens] its place among the sequence's rows
    context_slots: torch.Tensor  # [num_sequences, longest context]
    mask: torch.Tensor  # [num_sequences, 1, most rows, longest context] bool, True where a row attends
    most_rows: int


class TorchKernels:
    """Kernels for one model shape in torch operations."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.device = device
        self._dtype = dtype
        self._shape = (num_heads, num_kv_heads, head_dim, block_size)

    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        _, num_kv_heads, head_dim, _ = self._shape
        return 2 * num_kv_heads * head_dim * self._dtype.itemsize

    def allocate_cache(self, num_blocks: int) -> TorchKVCache:
        """One layer's cache."""
        _, num_kv_heads, head_dim, block_size = self._shape
        shape = (num_blocks * block_size, num_kv_heads, head_dim)
        return TorchKVCache(*(torch.zeros(shape, device=self.device, dtype=self._dtype) for _ in range(2)))

    def copy_blocks(self, cache: TorchKVCache, sources: list[int], targets: list[int]) -> None:
        """Copy whole blocks of one layer; all are read before any is written."""
        block_size = self._shape[3]
        for rows in (cache.keys, cache.values):
            blocks = rows.unflatten(0, (-1, block_size))
            blocks[targets] = blocks[sources]

    def prepare(self, step: StepInput) -> DeviceStep:
        """Move the step's arrays to the device and lay out the batched attention."""
        block_size = self._shape[3]
        to_device = lambda array: torch.from_numpy(array).to(self.device).long()  # noqa: E731
        sequences = torch.from_numpy(step.sequences).long()
        counts = torch.bincount(sequences, minlength=len(step.block_tables))
        place = torch.arange(step.num_tokens) - (counts.cumsum(0) - counts)[sequences]
        longest, most_rows = int(step.context_end.max()), int(counts.max())
        slots = torch.arange(longest)
        tables = torch.from_numpy(step.block_tables).long()
        mask = torch.zeros(len(tables), 1, most_rows, longest, dtype=torch.bool)
        starts, ends = torch.from_numpy(step.context_start)[:, None], torch.from_numpy(step.context_end)[:, None]
        mask[sequences, 0, place] = (slots >= starts) & (slots < ends)
        # A place without a row attends to the first slot: a softmax over nothing would be NaN.
        empty = torch.arange(most_rows)[None, :] >= counts[:, None]
        mask[:, 0, :, 0] |= empty
        return DeviceStep(
            positions=to_device(step.positions),
            slots=to_device(step.slots),
            row_of=sequences.to(self.device),
            place_of=place.to(self.device),
            context_slots=(tables[:, slots // block_size] * block_size + slots % block_size).to(self.device),
            mask=mask.to(self.device),
            most_rows=most_rows,
        )

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """[rows, hidden] -> x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich, 2019)."""
        return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), epsilon).to(x.dtype)

    def add_rms_norm(
        self, delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """residual += delta, in place; returns its RMS norm. All [rows, hidden]."""
        residual += delta
        return self.rms_norm(residual, weight, epsilon)

    def head_norm(self, qkv: torch.Tensor, first: int, count: int, weight: torch.Tensor, epsilon: float) -> None:
        """RMS norm of each of `count` heads from head `first` on, in place (Qwen3). qkv: [rows, heads * head_dim]."""
        head_dim = self._shape[2]
        heads = qkv[:, first * head_dim : (first + count) * head_dim].unflatten(1, (count, head_dim))
        heads.copy_(self.rms_norm(heads, weight, epsilon))

    def rotate_and_store(
        self, qkv: torch.Tensor, cache: TorchKVCache, step: DeviceStep, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        """Rotate queries in place, rotate keys, and write keys and values to their slots.

        Args:
            qkv: [rows, (num_heads + 2 * num_kv_heads) * head_dim].
            cos, sin: [max_model_len, head_dim / 2], rotary embedding in the half-split form (Su et al., 2021).
        """
        num_heads, num_kv_heads, head_dim, _ = self._shape
        heads = qkv[: len(step.slots)].unflatten(1, (num_heads + 2 * num_kv_heads, head_dim))
        rotated = heads[:, : num_heads + num_kv_heads]
        low, high = rotated.float().chunk(2, dim=-1)
        c, s = cos[step.positions][:, None], sin[step.positions][:, None]
        rotated.copy_(torch.cat([low * c - high * s, high * c + low * s], dim=-1))
        cache.keys[step.slots] = heads[:, num_heads : num_heads + num_kv_heads]
        cache.values[step.slots] = heads[:, num_heads + num_kv_heads :]

    def attention(self, qkv: torch.Tensor, cache: TorchKVCache, step: DeviceStep) -> torch.Tensor:
        """Causal attention of each row over its sequence's cache. Returns [rows, num_heads * head_dim]."""
        num_heads, num_kv_heads, head_dim, _ = self._shape
        num_tokens, num_sequences = len(step.slots), len(step.context_slots)
        queries = qkv.new_zeros(num_sequences, step.most_rows, num_heads, head_dim)
        queries[step.row_of, step.place_of] = qkv[:num_tokens, : num_heads * head_dim].unflatten(1, (num_heads, -1))
        attended = F.scaled_dot_product_attention(
            queries.transpose(1, 2),
            cache.keys[step.context_slots].transpose(1, 2),
            cache.values[step.context_slots].transpose(1, 2),
            attn_mask=step.mask,
            enable_gqa=num_heads != num_kv_heads,
        ).transpose(1, 2)
        out = qkv.new_zeros(len(qkv), num_heads * head_dim)
        out[:num_tokens] = attended[step.row_of, step.place_of].flatten(1)
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[rows, 2 * width] -> silu(gate) * up, [rows, width] (Shazeer, 2020)."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
