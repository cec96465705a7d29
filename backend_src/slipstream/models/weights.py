"""Reading a model folder: its configuration and its safetensors. Pickles are never read, remote code never run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from slipstream.errors import ConfigError, ModelNotFound

SUPPORTED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a Llama-family decoder, from its config.json."""

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: dict[str, Any]
    eos_token_ids: frozenset[int]

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read config.json and generation_config.json.

        Raises:
            ModelNotFound: there is no config.json.
            ConfigError: a model, or a feature of it, that this runner does not compute.
        """
        path = folder / "config.json"
        if not path.exists():
            raise ModelNotFound(f"{folder} has no config.json")
        config = json.loads(path.read_text())
        family = config.get("model_type")
        if family not in SUPPORTED_FAMILIES:
            raise ConfigError(f"model_type is {family!r}; the runner computes {', '.join(SUPPORTED_FAMILIES)}")
        if config.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"hidden_act is {config['hidden_act']!r}; the runner computes silu")
        quantization = config.get("quantization_config")
        if quantization:
            method = quantization.get("quant_method", "unknown")
            raise ConfigError(f"quantization_config is {method!r}; the runner reads unquantised weights only")
        window = config.get("sliding_window")
        if window and config.get("use_sliding_window", family == "mistral"):
            raise ConfigError(f"sliding_window is {window}; the runner computes full attention only")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        # Older configurations name the type "type".
        named = {"rope_type": rope.get("type", "default"), "rope_theta": config.get("rope_theta", 10000.0)}
        rope = {**named, **rope}
        if rope["rope_type"] not in ("default", "linear", "llama3"):
            raise ConfigError(f"rope_type is {rope['rope_type']!r}; the runner computes default, linear and llama3")
        heads = config["num_attention_heads"]
        return cls(
            family=family,
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
            max_model_len=config["max_position_embeddings"],
            rms_norm_eps=config["rms_norm_eps"],
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            rope=rope,
            eos_token_ids=_eos_token_ids(folder, config),
        )


class Checkpoint:
    """Tensors of a folder's safetensors files by name, read one at a time."""

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelNotFound(f"{folder} has no *.safetensors file; other formats are not read")
        self._where: dict[str, Path] = {}
        for file in files:
            with safe_open(str(file), framework="pt") as tensors:
                self._where.update(dict.fromkeys(tensors.keys(), file))

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def get(self, name: str) -> torch.Tensor:
        """One tensor, in the dtype it is stored in.

        Raises:
            ModelNotFound: no file has a tensor of that name.
        """
        if name not in self._where:
            raise ModelNotFound(f"the checkpoint has no tensor {name!r}")
        # Opened each time: what has been read of an open file counts as this process's memory.
        with safe_open(str(self._where[name]), framework="pt") as tensors:
            return tensors.get_tensor(name)

    def fused(self, names: list[str]) -> torch.Tensor:
        """Several projections of the same input as one: their rows one below the other."""
        return torch.cat([self.get(name) for name in names])


def _eos_token_ids(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    generation = folder / "generation_config.json"
    declared = json.loads(generation.read_text()).get("eos_token_id") if generation.exists() else None
    if declared is None:
        declared = config.get("eos_token_id")
    if declared is None:
        return frozenset()
    return frozenset(declared if isinstance(declared, list) else [declared])
