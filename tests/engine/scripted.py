"""A runner without weights, whose tokens are a pure function of what it reads back from its own paged cache.

Every chunk is written to the slots that the block table names, each token with its position. The next token of a
sequence is a hash of all that is then read through its table. So a chunk that starts in the wrong place, a lost or
shared block, or a preempted sequence that is not computed again changes the output, or fails here.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection

from slipstream.config import EngineConfig
from slipstream.engine.batch import Batch, Chunk, StepOutput
from slipstream.engine.request import (
    FINISH_LENGTH,
    FINISH_STOP,
    NOT_FINITE,
    Request,
    SamplingParams,
    TokenLogprobs,
)
from slipstream.errors import OutOfMemory

BLOCK_SIZE = 8
VOCAB_SIZE = 32
EOS_TOKEN_IDS = frozenset({3})
DOOR = b"door"


class Clock:
    """A clock that moves one millisecond each time it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


class StepFailed(RuntimeError):
    """What the runner raises in the steps that it was told to fail."""


class ScriptedRunner:
    """Implements `slipstream.models.runner.Runner`.

    Args:
        failing_steps: numbers of the calls of `run` that raise.
        not_finite: (request key, output index) whose logits are not finite.
        most_tokens: of one step, for which there is memory.
    """

    device_name = "scripted"
    batch_invariant = True
    vocab_size = VOCAB_SIZE

    def __init__(
        self,
        num_blocks: int,
        *,
        token_budget: int = 64,
        max_model_len: int = 1024,
        eos_token_ids: frozenset[int] = EOS_TOKEN_IDS,
        failing_steps: Collection[int] = (),
        not_finite: Collection[tuple[tuple[bytes, int], int]] = (),
        most_tokens: int | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.token_budget = token_budget
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.num_rows = 0  # rows of the steps that did not fail
        self.batches: list[Batch] = []
        self._failing_steps = failing_steps
        self._not_finite = not_finite
        self._most_tokens = most_tokens
        self._cache: dict[int, tuple[int, int]] = {}  # slot -> (position, token id)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """All that lies in a block; nobody else may read what is copied over."""
        assert len({target for _, target in copies}) == len(copies)
        contents = [
            (target * BLOCK_SIZE + offset, self._cache.get(source * BLOCK_SIZE + offset))
            for source, target in copies
            for offset in range(BLOCK_SIZE)
        ]
        self._cache.update((slot, written) for slot, written in contents if written is not None)

    def run(self, batch: Batch) -> StepOutput:
        """Write all chunks, then read the sampled sequences back."""
        if self._most_tokens is not None and batch.num_tokens > self._most_tokens:
            raise OutOfMemory(f"{batch.num_tokens} tokens")
        self.batches.append(batch)
        written: set[int] = set()
        for chunk in batch.chunks:
            for position, token_id in enumerate(chunk.token_ids, start=chunk.start):
                slot = _slot(chunk.request, position)
                assert slot not in written, f"slot {slot} is written twice in one step"
                written.add(slot)
                self._cache[slot] = (position, token_id)
        if len(self.batches) - 1 in self._failing_steps:
            raise StepFailed(f"scripted failure of step {len(self.batches) - 1}")
        self.num_rows += batch.num_tokens
        output = StepOutput([self._sample(chunk) for chunk in batch.sampled])
        for chunk, token_id in zip(batch.sampled, output.token_ids, strict=True):
            if chunk.request.sampling.logprobs is not None and token_id >= 0:
                output.logprobs.append((chunk.request, scripted_logprobs(token_id)))
        for chunk in batch.chunks:
            if chunk.scored_ids:
                output.prompt_logprobs.append((chunk, [scripted_logprobs(token_id) for token_id in chunk.scored_ids]))
        return output

    def _sample(self, chunk: Chunk) -> int:
        request = chunk.request
        if (request.key, request.num_output_tokens) in self._not_finite:
            return NOT_FINITE
        context = []
        for position in range(request.padding, chunk.start + chunk.num_tokens):
            written_position, token_id = self._cache[_slot(request, position)]
            assert written_position == position, f"position {position} of {request.key} holds another's keys"
            context.append(token_id)
        return next_token(context, request.sampling.seed, request.choice)


def next_token(context: list[int], seed: int, choice: int = 0) -> int:
    """The token that follows `context`: a hash of all of it."""
    return zlib.crc32(bytes(context), (seed + choice * 0x9E3779B9) & 0xFFFFFFFF) % VOCAB_SIZE


def scripted_logprobs(token_id: int) -> TokenLogprobs:
    """What is reported of a token: something that no other token has."""
    return TokenLogprobs([token_id], [-float(token_id)], 1)


def expected_output(
    prompt_ids: list[int],
    sampling: SamplingParams,
    eos_token_ids: frozenset[int] = EOS_TOKEN_IDS,
    choice: int = 0,
) -> tuple[list[int], str]:
    """Tokens and finish reason of a request that runs alone and undisturbed, by the contract's words."""
    context = list(prompt_ids)
    while True:
        token_id = next_token(context, sampling.seed, choice)
        context.append(token_id)
        output = context[len(prompt_ids) :]
        if token_id in sampling.stop_token_ids or (token_id in eos_token_ids and not sampling.ignore_eos):
            return output, FINISH_STOP
        if len(output) == sampling.stop_length:
            return output, FINISH_STOP
        if len(output) == sampling.max_tokens:
            return output, FINISH_LENGTH


def make_config(**fields: object) -> EngineConfig:
    """A configuration for the scripted runner's block size."""
    return EngineConfig(**{"name": "scripted", "block_size": BLOCK_SIZE, **fields})  # type: ignore[arg-type]


def make_prompt(length: int, number: int = 0) -> list[int]:
    """A prompt that differs with `number` in its very first token."""
    return [(number * 7 + index * index + 5) % VOCAB_SIZE for index in range(length)]


def make_request(number: int, prompt: int | list[int], max_tokens: int, **sampling: object) -> Request:
    """Request `number` with a prompt of that length, or of those ids."""
    prompt_ids = make_prompt(prompt, number) if isinstance(prompt, int) else prompt
    parameters = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
    return Request((DOOR, number), prompt_ids, parameters, arrival_time=0.0)


def output_of(request: Request) -> list[int]:
    """The tokens generated so far."""
    return request.token_ids[request.num_prompt_tokens :]


def _slot(request: Request, position: int) -> int:
    return request.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
