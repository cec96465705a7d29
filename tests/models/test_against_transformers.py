"""Whole models against transformers: the same logits to rounding, the same greedy tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from slipstream.models import runner
from slipstream.models.kernels.torch_ops import TorchKernels
from slipstream.models.llama import LlamaModel
from slipstream.models.weights import Checkpoint
from tiny_model import SHAPE, Answer, TinyEngine, load_reference, make_prompts, save_tiny_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama, every bias, own head": LlamaConfig(
        **SHAPE, tie_word_embeddings=False, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3
    ),
    "llama, llama3 rope": LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
    "llama, linear rope": LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    ),
    "llama, one KV head": LlamaConfig(**{**SHAPE, "num_key_value_heads": 1}),
    "llama, wide heads": LlamaConfig(**{**SHAPE, "head_dim": 32, "num_key_value_heads": 4}),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
}
PROMPTS = make_prompts(5, longest=80)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_tiny_model(tmp_path_factory.mktemp("model"), config) for name, config in CONFIGS.items()}


def use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run on the plain torch operations that CUDA uses."""

    def make(
        config: Any, model: Any, folder: Path, device: torch.device, storage: str, max_len: int, _: Any
    ) -> LlamaModel:
        heads = (model.num_heads, model.num_kv_heads, model.head_dim, config.block_size)
        kernels = TorchKernels(*heads, device=device, dtype=torch.float32)
        return LlamaModel(model, Checkpoint(folder), kernels, storage, max_len)

    monkeypatch.setattr(runner, "_make_model", make)


def assert_agrees(answer: Answer, prompt: list[int], reference: Any) -> None:
    """Every output's logits are those of the whole sequence in one forward pass of the reference.

    Sums of some hundred float32 products in another order, through two layers: errors of 1e-5 relative to logits of
    size 1 to 10. The gap between the best two logits is wider wherever the tokens agree.
    """
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.stack(answer.logits), expected, rtol=1e-4, atol=1e-4)
    assert answer.token_ids == expected.argmax(-1).tolist()


@pytest.mark.parametrize("kernels", ["numba", "torch"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_greedy_tokens_equal_those_of_transformers(
    folders: dict[str, Path], name: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one batch, prompts in chunks."""
    if kernels == "torch":
        use_torch(monkeypatch)
    engine = TinyEngine(folders[name], weights="fp32", max_num_batched_tokens=50)
    for number, prompt in enumerate(PROMPTS):
        engine.start(number, prompt, max_tokens=10)
    answers = engine.run()
    reference = load_reference(folders[name])
    for number, prompt in enumerate(PROMPTS):
        assert_agrees(answers[number], prompt, reference)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32])
def test_prompts_around_a_blocks_edges_equal_the_unpaged_model(folders: dict[str, Path], length: int) -> None:
    """LEN-12: with the reference of a model that has no blocks."""
    prompt = make_prompts(7)[1][:length]
    answer = TinyEngine(folders["llama"], weights="fp32").answer(prompt, max_tokens=1)
    assert_agrees(answer, prompt, load_reference(folders["llama"]))


def test_packed_weights_keep_the_precision_of_fp16(folders: dict[str, Path]) -> None:
    """fp16 has 11 bits: a relative error of 2^-12 a weight, which through two layers stays below one percent."""
    prompt = PROMPTS[1]
    answer = TinyEngine(folders["llama"]).answer(prompt, max_tokens=1)
    with torch.inference_mode():
        expected = load_reference(folders["llama"])(torch.tensor([prompt])).logits[0, -1]
    error = (answer.logits[0] - expected).norm() / expected.norm()
    assert error < 1e-2


def test_rope_scaling_in_its_old_form_is_scaled_too(folders: dict[str, Path], tmp_path: Path) -> None:
    """Configurations of 2023 and 2024 say `rope_scaling: {"type": …}`."""
    source = folders["llama, linear rope"]
    config = json.loads((source / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    answer = TinyEngine(tmp_path, weights="fp32").answer(PROMPTS[1], max_tokens=4)
    assert_agrees(answer, PROMPTS[1], load_reference(source))


def test_a_checkpoint_in_several_files_is_the_same_model(folders: dict[str, Path], tmp_path: Path) -> None:
    load_reference(folders["llama"]).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    whole = TinyEngine(folders["llama"]).answer(PROMPTS[1])
    assert TinyEngine(tmp_path).answer(PROMPTS[1]).token_ids == whole.token_ids


# --- the path that CUDA takes


def run_all(folder: Path, **fields: Any) -> dict[int, Answer]:
    engine = TinyEngine(folder, **fields)
    for number, prompt in enumerate(PROMPTS):
        engine.start(number, prompt[:20], max_tokens=30)
    return engine.run()


@pytest.mark.parametrize("policy", ["continuous", "lockstep", "iterative"])
def test_the_torch_path_batches_continuously(
    folders: dict[str, Path], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 its greedy tokens are those of each request alone, also when it preempts."""
    use_torch(monkeypatch)
    engine = TinyEngine(folders["llama"], weights="fp32")
    alone = [engine.answer(prompt[:20], max_tokens=30).token_ids for prompt in PROMPTS]
    blocks = 8 if policy == "continuous" else 64
    answers = run_all(folders["llama"], weights="fp32", policy=policy, num_blocks=blocks)
    assert [answers[number].token_ids for number in range(len(PROMPTS))] == alone
    if policy == "continuous":
        assert sum(answer.num_preemptions for answer in answers.values()) > 0


def test_bf16_runs_on_the_torch_path(folders: dict[str, Path]) -> None:
    """bf16 has 8 bits: logits within a few percent of float32's, and no claim of batch invariance."""
    engine = TinyEngine(folders["llama"], weights="bf16")
    assert not engine.runner.batch_invariant
    exact = TinyEngine(folders["llama"], weights="fp32").answer(PROMPTS[1], max_tokens=1).logits[0]
    first = engine.answer(PROMPTS[1], max_tokens=1).logits[0]
    assert (first.float() - exact).norm() / exact.norm() < 0.1
    answers = run_all(folders["llama"], weights="bf16")
    assert all(len(answer.token_ids) == 30 for answer in answers.values())


@pytest.mark.parametrize("kernels", ["numba", "torch"])
def test_lock_step_rows_that_ended_may_run_past_the_context(
    folders: dict[str, Path], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full-length prompt with a short answer is computed on beside a short prompt with a full-length answer."""
    if kernels == "torch":
        use_torch(monkeypatch)
    prompt = PROMPTS[1][:60]
    fields = {"weights": "fp32", "max_model_len": 64}
    alone = TinyEngine(folders["llama"], **fields)
    expected = [alone.answer(prompt, max_tokens=4), alone.answer(prompt[:2], max_tokens=62)]
    engine = TinyEngine(folders["llama"], policy="lockstep", **fields)
    engine.start(0, prompt, max_tokens=4)
    engine.start(1, prompt[:2], max_tokens=62)
    answers = engine.run()
    assert [answers[number].finish_reason for number in (0, 1)] == ["length", "length"]
    assert [answers[number].token_ids for number in (0, 1)] == [answer.token_ids for answer in expected]
