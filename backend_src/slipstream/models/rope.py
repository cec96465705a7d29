"""Rotary position embedding."""

from __future__ import annotations

import math
from typing import Any

import torch


def rotary_tables(
    rope: dict[str, Any], head_dim: int, max_model_len: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position, [max_model_len, head_dim / 2] float32 each.

    Rotary embedding of Su et al., 2021; `llama3` rescales low frequencies as the Llama 3.1 release does.
    """
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope["rope_type"] == "linear":
        frequencies = frequencies / rope["factor"]
    elif rope["rope_type"] == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = (1 - smooth) * frequencies / rope["factor"] + smooth * frequencies
    angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), frequencies)
    return angles.cos().to(device), angles.sin().to(device)
