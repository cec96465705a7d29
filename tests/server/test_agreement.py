"""The same greedy tokens from every batcher, whatever else is computed beside them."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import Tokenizer

from helpers import MODELS, PROMPTS, Answer, ask, ask_batch, sampling_json
from observing import engine_status
from slipstream_client.aio import AsyncSlipstreamClient
from slipstream_client.server.tritonserver import TritonServer

pytestmark = pytest.mark.server

NUM_TOKENS = 16


def ask_all_at_once(server: TritonServer, model: str, prompts: list[str], num_tokens: int) -> list[Answer]:
    if model == "static":
        return ask_batch(server, prompts, [sampling_json(max_tokens=num_tokens)] * len(prompts))
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: ask(server, model, prompt, max_tokens=num_tokens), prompts))


@pytest.mark.parametrize("model", MODELS)
def test_eight_prompts_at_once_get_the_same_tokens_from_every_batcher(
    server: TritonServer, golden: dict[str, list[int]], model: str
) -> None:
    answers = ask_all_at_once(server, model, list(PROMPTS), NUM_TOKENS)
    assert [answer.ids for answer in answers] == [golden[prompt][:NUM_TOKENS] for prompt in PROMPTS]
    assert [answer.num_output_tokens for answer in answers] == [NUM_TOKENS] * len(PROMPTS)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("prompt", [PROMPTS[0], PROMPTS[4]])
def test_a_prompt_alone_gets_the_tokens_that_it_gets_beside_others(
    server: TritonServer, golden: dict[str, list[int]], model: str, prompt: str
) -> None:
    assert ask(server, model, prompt, max_tokens=8).ids == golden[prompt][:8]


@pytest.mark.parametrize("model", ["continuous", "dynamic", "iterative"])
def test_more_requests_than_seats_get_their_own_answers(
    server: TritonServer, golden: dict[str, list[int]], model: str
) -> None:
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(24)]
    answers = ask_all_at_once(server, model, prompts, 4)
    assert [answer.ids for answer in answers] == [golden[prompt][:4] for prompt in prompts]


def test_eight_streaming_clients_at_once_each_get_their_own_text(
    server: TritonServer, golden: dict[str, list[int]], tokenizer: Tokenizer
) -> None:
    async def stream(prompt: str) -> tuple[str, list[int]]:
        async with AsyncSlipstreamClient(server.grpc_url) as client:
            chunks = [
                chunk
                async for chunk in client.stream(prompt, max_tokens=NUM_TOKENS, temperature=0, return_token_ids=True)
            ]
        assert chunks[-1].stats is not None
        return "".join(chunk.text for chunk in chunks), chunks[-1].stats["output_ids"]

    async def all_at_once() -> list[tuple[str, list[int]]]:
        return await asyncio.gather(*(stream(prompt) for prompt in PROMPTS))

    expected = [golden[prompt][:NUM_TOKENS] for prompt in PROMPTS]
    assert asyncio.run(all_at_once()) == [(tokenizer.decode(ids), ids) for ids in expected]


def test_every_engine_says_that_it_is_batch_invariant(server: TritonServer) -> None:
    assert {
        engine: engine_status(server, engine)["batch_invariant"]
        for engine in ("continuous", "static", "dynamic", "iterative")
    } == dict.fromkeys(("continuous", "static", "dynamic", "iterative"), True)
