"""The demo's model, whole and real."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.request import Request, SamplingParams
from slipstream.errors import ModelNotFound
from slipstream.models.runner import ModelRunner
from slipstream.models.store import resolve
from tiny_model import Answer, load_reference

PROMPTS = ["The capital of France is", "Water boils at a temperature of", "Once upon a time, in a village by the sea,"]
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return resolve("smollm2-135m")
    except ModelNotFound as missing:
        pytest.fail(f"this test needs the demo's model: {missing}")


def test_greedy_answers_equal_those_of_transformers_in_float32(folder: Path) -> None:
    """Three prompts in one batch, on the default packed weights."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    runner = ModelRunner(EngineConfig("smoke", kv_cache_bytes=16 << 20, max_model_len=256), folder)
    assert runner.batch_invariant
    engine = Engine(EngineConfig("smoke", kv_cache_bytes=16 << 20, max_model_len=256), runner)
    requests = []
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
        requests.append(Request((b"", number), prompt, sampling, 0.0))
        engine.add(requests[-1])
    while engine.has_work:
        engine.step()
    answers = [Answer(request.token_ids[request.num_prompt_tokens :]) for request in requests]

    reference = load_reference(folder)
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
        assert answer.token_ids == logits.argmax(-1).tolist()
    assert "Paris" in tokenizer.decode(answers[0].token_ids)
