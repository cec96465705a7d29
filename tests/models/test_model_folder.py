"""What a model folder says, and which models are refused by the name of the feature that is not computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.errors import ConfigError, ModelNotFound
from slipstream.models.runner import ModelRunner
from slipstream.models.weights import Checkpoint, ModelConfig
from tiny_model import KV_VALUES_PER_TOKEN, TinyEngine, make_config


def write_config(folder: Path, tiny_llama: Path, changes: dict[str, Any]) -> Path:
    """The tiny model's configuration with changes; a value of None removes the field."""
    config = json.loads((tiny_llama / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; the runner computes llama, mistral, qwen2, qwen3"),
        ({"model_type": "gemma3_text"}, "model_type is 'gemma3_text'"),
        ({"model_type": None}, "model_type is None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window is 4096"),
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True}, "sliding_window is 128"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"rope_parameters": None, "rope_scaling": {"rope_type": "longrope"}}, "rope_type is 'longrope'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is 'fp8'"),
    ],
)
def test_a_model_that_is_not_computed_is_refused_by_the_feature(
    tiny_llama: Path, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    """PFX-15 among them: a sliding window is refused, never ignored."""
    with pytest.raises(ConfigError) as refusal:
        ModelConfig.from_folder(write_config(tmp_path, tiny_llama, changes))
    assert reason in str(refusal.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "qwen2", "sliding_window": 32768, "use_sliding_window": False},
        {"model_type": "qwen3", "sliding_window": 32768},
    ],
)
def test_a_window_that_is_switched_off_is_none(tiny_llama: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    assert ModelConfig.from_folder(write_config(tmp_path, tiny_llama, changes)).num_layers == 2


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        (2, None, {2}),
        ([2, 5], None, {2, 5}),
        (None, None, set()),
        (2, {"eos_token_id": [7, 8]}, {7, 8}),
        (2, {"temperature": 0.6}, {2}),
        (None, {"eos_token_id": 9}, {9}),
    ],
)
def test_eos_ids_are_those_of_the_generation_config_first(
    tiny_llama: Path, tmp_path: Path, config: Any, generation: dict[str, Any] | None, ids: set[int]
) -> None:
    write_config(tmp_path, tiny_llama, {"eos_token_id": config})
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == ids


def test_head_sizes_left_out_follow_from_the_others(tiny_llama: Path, tmp_path: Path) -> None:
    config = ModelConfig.from_folder(
        write_config(tmp_path, tiny_llama, {"head_dim": None, "num_key_value_heads": None})
    )
    assert (config.head_dim, config.num_kv_heads) == (16, 4)


def test_a_folder_that_lacks_something_says_what(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(ModelNotFound, match=r"has no \*.safetensors file; other formats are not read"):
        Checkpoint(tmp_path)
    tensors = load_file(tiny_llama / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    write_config(tmp_path, tiny_llama, {})
    with pytest.raises(ModelNotFound, match=r"no tensor 'model.layers.1.mlp.up_proj.weight'"):
        ModelRunner(make_config(), tmp_path)


# --- the runner's own checks


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_model_len": 257}, "max_model_len is 257; the model allows at most 256"),
        ({"kv_cache_bytes": 4095}, "kv_cache_bytes is 4095; one block of this model takes 4096"),
        (
            {"kv_cache_bytes": 8191, "kv_cache_dtype": "fp32"},
            "kv_cache_bytes is 8191; one block of this model takes 8192",
        ),
    ],
)
def test_what_the_model_cannot_do_is_refused_with_the_numbers(
    tiny_llama: Path, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        ModelRunner(make_config(**fields), tiny_llama)
    assert str(refusal.value) == reason


def test_cuda_is_refused_where_there_is_none(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no CUDA device here"):
        ModelRunner(make_config(device="cuda"), tiny_llama)
    assert ModelRunner(make_config(device="auto"), tiny_llama).device_name == "cpu"


@pytest.mark.parametrize(("kv_cache_dtype", "value_bytes"), [("auto", 2), ("fp16", 2), ("fp32", 4)])
def test_the_pool_is_as_large_as_its_bytes_allow(tiny_llama: Path, kv_cache_dtype: str, value_bytes: int) -> None:
    """A block holds keys and values of all layers."""
    size = 100 * 16 * KV_VALUES_PER_TOKEN * value_bytes + 1
    runner = ModelRunner(make_config(kv_cache_bytes=size, kv_cache_dtype=kv_cache_dtype), tiny_llama)
    assert runner.num_blocks == 100
    assert runner.max_model_len == 256
    assert runner.vocab_size == 256
    assert runner.token_budget == 512
    assert runner.batch_invariant


def test_an_eos_token_ends_an_answer_and_ignore_eos_goes_on(tiny_llama: Path) -> None:
    prompt = next(
        prompt
        for prompt in ([number] for number in range(3, 256))
        if 2 in TinyEngine(tiny_llama).answer(prompt, max_tokens=30).token_ids[:-1]
    )
    ignoring = TinyEngine(tiny_llama).answer(prompt, max_tokens=30)
    stopping = TinyEngine(tiny_llama).answer(prompt, max_tokens=30, ignore_eos=False)
    assert stopping.token_ids == ignoring.token_ids[: ignoring.token_ids.index(2) + 1]
    assert (stopping.finish_reason, ignoring.finish_reason) == ("stop", "length")
