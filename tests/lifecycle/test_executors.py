"""What computes a lock-step batch is a switch: `model.generate()` of transformers answers as our own code does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from helpers import PROMPTS, Answer, Refused, ask, ask_batch, sampling_json
from observing import engine_status, wait_until_at_rest
from slipstream_client.server.tritonserver import ServerError, TritonServer

pytestmark = pytest.mark.server

# Of different lengths and ends, some greedy and some drawn.
SAMPLINGS: list[dict[str, Any]] = [
    {"max_tokens": 24, "ignore_eos": True, "stop_length": 1 + 3 * number, "temperature": number % 2, "seed": number}
    for number in range(len(PROMPTS))
]


def ask_all(server: TritonServer) -> list[Answer]:
    """The answers of `dynamic` to clients that come at once, and then those of `static` to one client's batch."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        dynamic = list(pool.map(lambda prompt, fields: ask(server, "dynamic", prompt, **fields), PROMPTS, SAMPLINGS))
    return dynamic + ask_batch(server, PROMPTS, [sampling_json(**fields) for fields in SAMPLINGS])


def test_static_and_dynamic_answer_alike_with_both_executors(
    start_server: Callable[..., TritonServer], tiny_llama: Path
) -> None:
    models = ("static", "dynamic")
    environment = {"SLIPSTREAM_MODEL": str(tiny_llama), "SLIPSTREAM_WEIGHTS": "fp32"}
    native = start_server(*models, **environment)
    expected = ask_all(native)
    native.kill()
    server = start_server(*models, **environment, SLIPSTREAM_EXECUTOR="transformers")
    assert [engine_status(server, model)["executor"] for model in models] == ["transformers"] * 2
    answers = ask_all(server)
    assert [answer.ids for answer in answers] == [answer.ids for answer in expected]
    assert [(answer.text, answer.finish_reason) for answer in answers] == [
        (answer.text, answer.finish_reason) for answer in expected
    ]
    assert [answer.num_output_tokens for answer in answers] == [1 + 3 * number for number in range(len(PROMPTS))] * 2
    assert {answer.finish_reason for answer in answers} == {"stop"}
    with pytest.raises(Refused, match="prompt_logprobs is not supported by this model"):
        ask(server, "dynamic", PROMPTS[0], prompt_logprobs=1)
    wait_until_at_rest(server, models)


def test_a_model_that_batches_continuously_does_not_load_with_generate(
    start_server: Callable[..., TritonServer],
) -> None:
    with pytest.raises(ServerError, match="executor is 'transformers' and policy is 'continuous'"):
        start_server("continuous", SLIPSTREAM_EXECUTOR="transformers")
