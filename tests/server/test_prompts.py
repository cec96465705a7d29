"""The four places where a prompt may stand: text, ids in a tensor, ids in the JSON, and a chat."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from helpers import PROMPTS, Refused, ask, ask_with, flag_tensor, generate, generate_body, sampling_json, text_tensor
from slipstream_client.server.tritonserver import TritonServer

pytestmark = pytest.mark.server

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of France?"}]
AS_TEXT = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
AS_TEXT += "<|im_start|>assistant\n"


def inputs(stream: bool, **sampling: object) -> list:  # type: ignore[type-arg]
    flags = ["return_finish_reason", "return_num_input_tokens", "return_num_output_tokens", "return_stats"]
    return [
        text_tensor("sampling_parameters", [sampling_json(**sampling)], [1]),
        *map(flag_tensor, [*flags, "stream"] if stream else flags),
    ]


@pytest.mark.parametrize("model", ["continuous", "continuous_unary"])
def test_a_chat_is_answered_as_the_text_that_its_template_makes(
    server: TritonServer, tokenizer: Tokenizer, model: str
) -> None:
    chat = ask_with(server, model, inputs(model == "continuous", messages=CHAT, max_tokens=24))
    text = ask(server, model, AS_TEXT, max_tokens=24)
    assert chat.ids == text.ids
    assert chat.num_input_tokens == len(tokenizer.encode(AS_TEXT, add_special_tokens=False).ids)
    assert "Paris" in chat.text
    assert chat.finish_reason == "stop"


@pytest.mark.parametrize("model", ["continuous", "continuous_unary"])
def test_a_stop_string_is_no_part_of_a_chats_answer_unless_asked_for(server: TritonServer, model: str) -> None:
    """STP-17: the default is that of OpenAI's routes, for chats as for any prompt."""
    chat = [{"role": "user", "content": "Count from 1 to 10."}]
    stream = model == "continuous"
    whole = ask_with(server, model, inputs(stream, messages=chat, max_tokens=48)).text
    before, found, _ = whole.partition("7")
    assert found, f"{whole!r} is not worth the test"
    for fields, text in (({}, before), ({"include_stop_str_in_output": True}, before + "7")):
        answer = ask_with(server, model, inputs(stream, messages=chat, max_tokens=48, stop=["7"], **fields))
        assert (answer.text, answer.finish_reason, answer.stats["stop_reason"]) == (text, "stop", "7")


def test_a_chat_over_http(server: TritonServer) -> None:
    body = {"sampling_parameters": json.dumps({"messages": CHAT, "max_tokens": 24, "temperature": 0})}
    status, answer = generate(server, "continuous", body)
    assert status == 200
    assert "Paris" in answer["text_output"]


def test_ids_in_the_json_are_a_prompt(server: TritonServer, golden: dict[str, list[int]], tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPTS[1]).ids
    assert ask_with(server, "continuous", inputs(True, prompt_token_ids=ids, max_tokens=16)).ids == golden[PROMPTS[1]]


def test_two_prompts_and_chats_that_are_none_are_refused(server: TritonServer) -> None:
    for sampling, says in [
        ({"messages": CHAT, "prompt_token_ids": [1]}, "not prompt_token_ids and messages"),
        ({"messages": [{"role": "me", "content": "x"}]}, "messages[0].role is 'me'"),
        ({"prompt_token_ids": [10**6]}, "prompt_token_ids has 1000000"),
    ]:
        with pytest.raises(Refused) as error:
            ask_with(server, "continuous", inputs(True, **sampling))
        assert says in error.value.text
    body = generate_body("continuous", PROMPTS[0], messages=CHAT)
    assert "not text_input and messages" in generate(server, "continuous", body)[1]["error"]
    with pytest.raises(Refused, match="messages is not supported by this model"):
        ask(server, "dynamic", PROMPTS[0], messages=CHAT)
