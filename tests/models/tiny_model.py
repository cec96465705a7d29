"""Randomly initialised models of a few thousand weights in Hugging Face's folder layout, and engines that run them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from slipstream.config import EngineConfig
from slipstream.engine.batch import Batch
from slipstream.engine.engine import Engine
from slipstream.engine.request import Request, SamplingParams
from slipstream.engine.sampler import Logits
from slipstream.models.runner import make_runner

VOCAB_SIZE = 256
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": None,
}
# A token's keys and values in all layers, in bytes.
KV_VALUES_PER_TOKEN = 2 * 2 * 2 * 16


def save_tiny_llama(folder: Path) -> Path:
    """The model that most tests run, with a tokenizer of one token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return save_tiny_model(folder, LlamaConfig(**SHAPE, tie_word_embeddings=True))


def save_tiny_model(folder: Path, config: Any, seed: int = 0) -> Path:
    """Save a model of that configuration whose weights, norms and biases are all random."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.15)
    model.save_pretrained(folder)
    return folder


def load_reference(folder: Path) -> PreTrainedModel:
    """The same model in transformers, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def make_config(**fields: Any) -> EngineConfig:
    """One thread and a pool of 256 blocks, unless told otherwise."""
    blocks = fields.pop("num_blocks", 256)
    block_size = fields.get("block_size", 16)
    is_float32 = fields.get("weights") == "fp32" or fields.get("executor") == "transformers"
    value_bytes = 4 if is_float32 or fields.get("kv_cache_dtype") == "fp32" else 2
    defaults = {
        "name": "tiny",
        "device": "cpu",
        "threads": 1,
        "kv_cache_bytes": blocks * block_size * KV_VALUES_PER_TOKEN * value_bytes,
    }
    return EngineConfig(**{**defaults, **fields})


@dataclass
class Answer:
    """What a request got: its tokens, and the logits that each was chosen from."""

    token_ids: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)  # [vocab] each
    finish_reason: str | None = None
    num_preemptions: int = 0


class TinyEngine:
    """An in-process engine on a tiny model that keeps the logits behind every token."""

    def __init__(self, folder: Path, **fields: Any) -> None:
        self.config = make_config(**fields)
        self.runner: Any = make_runner(self.config, folder)
        self.answers: dict[int, Answer] = {}
        self._logits = self.runner.logits
        self.runner.logits = self._keep_logits
        self.engine = Engine(self.config, self.runner)

    def start(self, number: int, prompt_ids: list[int], **sampling: Any) -> Request:
        """Submit request `number`."""
        parameters = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling})
        request = Request((b"", number), prompt_ids, parameters, arrival_time=0.0)
        self.answers.update((number + choice, Answer()) for choice in range(parameters.n))
        self.engine.add(request)
        return request

    def step(self) -> None:
        for request in self.engine.step():
            if request.finished:
                answer = self.answers[request.key[1]]
                answer.token_ids = request.token_ids[request.num_prompt_tokens :]
                answer.finish_reason = request.finish_reason
                answer.num_preemptions = request.num_preemptions

    def run(self) -> dict[int, Answer]:
        """Step until all have ended, naming every sequence in every call if the policy is iterative."""
        while self.engine.requests:
            if self.config.policy == "iterative":
                for request in self.engine.requests.values():
                    self.engine.scheduler.advance(request)  # type: ignore[attr-defined]
            self.step()
        return self.answers

    def answer(self, prompt_ids: list[int], **sampling: Any) -> Answer:
        """The answer to one prompt that runs alone."""
        number = len(self.answers)
        self.start(number, prompt_ids, **sampling)
        return self.run()[number]

    def _keep_logits(self, batch: Batch) -> Logits:
        logits = self._logits(batch)
        # Behind them come the rows that score prompts.
        for row, chunk in zip(logits.values, batch.sampled, strict=False):
            if not chunk.request.finished:
                self.answers[chunk.request.key[1]].logits.append(row.clone())
        return logits


def make_prompts(count: int, longest: int = 60) -> list[list[int]]:
    """Prompts of various lengths, one of a single token and one of `longest` among them."""
    generator = torch.Generator().manual_seed(count)
    lengths = [1, longest, *torch.randint(2, longest, (count,), generator=generator).tolist()][:count]
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def assert_same_bits(answer: Answer, reference: Answer) -> None:
    """Equal tokens from equal logits, bit by bit."""
    assert answer.token_ids == reference.token_ids
    assert len(answer.logits) == len(reference.logits) == len(answer.token_ids)
    for index, (row, expected) in enumerate(zip(answer.logits, reference.logits, strict=True)):
        assert torch.equal(row, expected), f"logits of output {index} differ by up to {(row - expected).abs().max()}"
