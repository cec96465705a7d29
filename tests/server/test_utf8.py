"""Text in any script: streamed pieces hold whole characters and join to the whole text."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tokenizers import Tokenizer

from helpers import (
    STREAMING,
    ask,
    ask_with,
    generate,
    generate_body,
    generate_stream,
    inputs_for,
    numpy_tensor,
    sampling_json,
)
from slipstream_client.server.tritonserver import TritonServer

pytestmark = pytest.mark.server

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Prompts whose continuation is, for the most part, in the same script.
PROMPTS = (
    "春夏秋冬 春夏秋冬 春夏秋冬 春夏",
    "😀😃😄😁😆 😀😃😄😁😆 😀😃",
    "नमस्ते दुनिया नमस्ते दुनिया नमस्ते",
    "👩‍👩‍👧‍👦 👩‍👩‍👧‍👦 👩‍👩‍👧‍👦 👩‍👩‍👧‍👦 👩‍👩",
)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_streamed_text_never_holds_half_a_character(server: TritonServer, tokenizer: Tokenizer, prompt: str) -> None:
    body = generate_body("continuous", prompt, max_tokens=16, ignore_eos=True)
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(ask, server, model, prompt, max_tokens=16, ignore_eos=True) for model in STREAMING]
        over_http = pool.submit(generate, server, "continuous", body)
        events = pool.submit(generate_stream, server, "continuous", body | {"stream": True})
    for answer in [answer.result() for answer in answers]:
        whole = tokenizer.decode(answer.ids)
        assert answer.text == whole
        assert any(ord(character) > 0x7F for character in whole), "the answer is worth the test"
        # The last one may be cut off by max_tokens; every other character is whole.
        assert REPLACEMENT not in "".join(answer.deltas[:-1])
    assert over_http.result()[1]["text_output"] == whole
    assert "".join(event["text_output"] for event in events.result()[1]) == whole


@pytest.mark.parametrize("num_tokens", range(1, 6))
def test_a_character_that_max_tokens_cuts_off_ends_the_stream_as_it_ends_the_whole_text(
    server: TritonServer, tokenizer: Tokenizer, num_tokens: int
) -> None:
    answer = ask(server, "continuous", PROMPTS[1], max_tokens=num_tokens, ignore_eos=True)
    assert answer.text == tokenizer.decode(answer.ids)
    assert answer.num_output_tokens == num_tokens


@pytest.mark.parametrize("seed", range(2))
def test_a_stream_of_random_tokens_joins_to_the_whole_text(
    server: TritonServer, tokenizer: Tokenizer, seed: int
) -> None:
    """At such a temperature the bytes are mostly no text at all."""
    answer = ask(server, "continuous", PROMPTS[0], max_tokens=40, temperature=50.0, seed=seed, ignore_eos=True)
    assert answer.text == tokenizer.decode(answer.ids)


@pytest.mark.parametrize("model", ["continuous", "continuous_unary"])
def test_a_prompt_that_ends_within_a_character_is_no_part_of_the_answer(
    server: TritonServer, tokenizer: Tokenizer, model: str
) -> None:
    """TXT-01: wherever in the character the prompt's ids end; whole and in pieces the answer is the same text."""
    prompt = "Hello world 🌶"
    ids = tokenizer.encode(prompt).ids
    cuts = [end for end in range(1, len(ids)) if tokenizer.decode(ids[:end]).endswith(REPLACEMENT)]
    assert len(cuts) >= 2, "the last character has several tokens"
    parts = {prompt[start : start + 5] for start in range(len(prompt) - 5)}
    for end in cuts:
        inputs = [
            numpy_tensor("input_ids", np.array(ids[:end], np.int32), "INT32"),
            *inputs_for(model, "", sampling_json(max_tokens=4))[1:],
        ]
        answer = ask_with(server, model, inputs)
        assert answer.num_input_tokens == end
        assert answer.text == tokenizer.decode(answer.ids)
        assert not [part for part in parts if part in answer.text]


def test_control_characters_and_nul_are_ordinary_text(server: TritonServer, tokenizer: Tokenizer) -> None:
    prompt = "a\0b\x1b[31m\r\n\t\x7f"
    for model in ("continuous", "dynamic"):
        answer = ask(server, model, prompt, max_tokens=2)
        assert answer.num_input_tokens == len(tokenizer.encode(prompt).ids)
