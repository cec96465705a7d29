"""Sampling parameters and stop strings through the real doors, against what is known of the greedy answer."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from helpers import (
    CAUGHT,
    PROMPTS,
    GrpcStream,
    Refused,
    ask,
    ask_with,
    generate,
    generate_body,
    generate_stream,
    inputs_for,
    numpy_tensor,
    sampling_json,
)
from observing import finished, wait_for_running
from slipstream_client.server.tritonserver import TritonServer

pytestmark = pytest.mark.server

CONTINUOUS = ("continuous", "continuous_unary")
NATIVE = ("continuous", "continuous_unary", "dynamic", "static", "iterative")


@pytest.fixture(scope="module")
def whole(shared_server: TritonServer) -> str:
    """The greedy answer that is cut below."""
    return ask(shared_server, "continuous", PROMPTS[4], max_tokens=40, ignore_eos=True).text


@pytest.mark.parametrize("model", CONTINUOUS)
@pytest.mark.parametrize("place", [0, 5, 17])
@pytest.mark.parametrize("length", [1, 7])
def test_a_stop_string_cuts_the_answer_wherever_it_begins(
    server: TritonServer, whole: str, model: str, place: int, length: int
) -> None:
    """STP-11: any piece of the answer as the stop string, streamed and not; it is not part of the text."""
    stop = whole[place : place + length]
    answer = ask(server, model, PROMPTS[4], max_tokens=40, ignore_eos=True, stop=[stop, "never said"])
    assert answer.text == whole[: whole.index(stop)]
    assert (answer.finish_reason, answer.stats["stop_reason"]) == ("stop", stop)
    assert 1 <= len(answer.ids) == answer.num_output_tokens == answer.stats["num_output_tokens"] <= 40
    with_it = ask(server, model, PROMPTS[4], max_tokens=40, ignore_eos=True, stop=stop, include_stop_str_in_output=True)
    assert with_it.text == answer.text + stop
    assert with_it.ids == answer.ids


def test_no_part_of_a_stop_string_is_ever_streamed(server: TritonServer, whole: str) -> None:
    """STP-01: and the tokens behind it are not counted as the answer's."""
    stop = whole[20:45]
    with GrpcStream(server) as stream:
        responses = stream.send("continuous", PROMPTS[4], max_tokens=40, ignore_eos=True, stop=[stop]).collect()
    assert "".join(response.text for response in responses) == whole[:20]
    assert [response.final for response in responses] == [False] * (len(responses) - 1) + [True]
    assert [response.finish_reason for response in responses] == [""] * (len(responses) - 1) + ["stop"]


def test_stop_strings_over_http(server: TritonServer, whole: str) -> None:
    stop = whole[6:11]
    body = generate_body("continuous", PROMPTS[4], max_tokens=40, ignore_eos=True, stop=[stop])
    assert generate(server, "continuous", body)[1]["text_output"] == whole[: whole.index(stop)]
    _, events = generate_stream(server, "continuous", {**body, "stream": True})
    assert "".join(event["text_output"] for event in events) == whole[: whole.index(stop)]


def test_an_answer_that_a_stop_string_ends_is_counted_as_stopped(server: TritonServer, whole: str) -> None:
    before, cancelled = finished(server, "continuous", "stop"), finished(server, "continuous", "cancelled")
    ask(server, "continuous", PROMPTS[4], max_tokens=400, ignore_eos=True, stop=whole[3:6])
    assert finished(server, "continuous", "stop") == before + 1
    assert finished(server, "continuous", "cancelled") == cancelled


def test_a_stop_string_that_never_comes_leaves_the_answer_whole(server: TritonServer, whole: str) -> None:
    """STP-03: what was held back at the end is part of it."""
    answer = ask(server, "continuous", PROMPTS[4], max_tokens=40, ignore_eos=True, stop=[whole[-3:] + "!?", "zzzz"])
    assert (answer.text, answer.finish_reason, answer.stats["stop_reason"]) == (whole, "length", None)


@pytest.mark.parametrize("model", CONTINUOUS)
@pytest.mark.parametrize("place", ["input_ids", "prompt_token_ids"])
def test_stop_strings_end_an_answer_to_token_ids_too(
    server: TritonServer, whole: str, tokenizer: Tokenizer, model: str, place: str
) -> None:
    """STP-12: no text goes in, ids come out, and a stop string is still looked for in what they say."""
    ids, stop = tokenizer.encode(PROMPTS[4]).ids, whole[20:26]
    sampling = {"max_tokens": 40, "ignore_eos": True, "stop": [stop]}
    if place == "input_ids":
        prompt = [numpy_tensor(place, np.array(ids, np.int32), "INT32")]
    else:
        prompt, sampling = [], sampling | {place: ids}
    answer = ask_with(server, model, prompt + inputs_for(model, "", sampling_json(**sampling))[1:])
    assert (answer.text, answer.finish_reason, answer.stats["stop_reason"]) == (whole[:20], "stop", stop)
    assert len(answer.ids) < 40
    assert tokenizer.decode(answer.ids).startswith(whole[:26])


@pytest.mark.parametrize("model", CONTINUOUS)
@pytest.mark.parametrize("skip", [True, False])
def test_the_text_before_a_stop_token_is_whole_and_the_token_is_one_of_the_ids(
    server: TritonServer, tokenizer: Tokenizer, model: str, skip: bool
) -> None:
    """STP-09: also what was held back as the beginning of a stop string.

    As in vLLM the stop token is no text, be it special or not, unless `include_stop_str_in_output` asks for it.
    """
    end = tokenizer.token_to_id("<|im_end|>")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = {"messages": chat, "max_tokens": 40, "ignore_eos": True, "stop_token_ids": [end]}
    whole = ask_with(server, model, inputs_for(model, "", sampling_json(**prompt))[1:])
    assert (whole.finish_reason, whole.stats["stop_reason"], whole.ids[-1]) == ("stop", end, end)
    assert whole.text == tokenizer.decode(whole.ids[:-1])
    for include in (True, False):
        held = {"stop": [whole.text[-3:] + "never"], "skip_special_tokens": skip, "include_stop_str_in_output": include}
        answer = ask_with(server, model, inputs_for(model, "", sampling_json(**prompt, **held))[1:])
        assert (answer.text, answer.ids) == (whole.text + "<|im_end|>" * (include and not skip), whole.ids)
        assert answer.stats["stop_reason"] == end
    prompt["stop_token_ids"] = [whole.ids[2]]
    for include in (True, False):
        inputs = inputs_for(model, "", sampling_json(**prompt, include_stop_str_in_output=include))[1:]
        answer = ask_with(server, model, inputs)
        assert answer.ids == whole.ids[: whole.ids.index(whole.ids[2]) + 1]
        assert answer.text == tokenizer.decode(answer.ids if include else answer.ids[:-1])


@pytest.mark.parametrize("model", ["dynamic", "iterative"])
def test_the_other_batchers_refuse_stop_strings_by_name(server: TritonServer, model: str) -> None:
    with pytest.raises(Refused, match="stop is not supported by this model"):
        ask(server, model, PROMPTS[0], stop="a")


@pytest.mark.parametrize("model", NATIVE)
def test_parameters_that_edit_the_logits_mean_the_same_to_every_batcher(
    server: TritonServer, golden: dict[str, list[int]], tokenizer: Tokenizer, model: str
) -> None:
    ids = golden[PROMPTS[0]]
    banned = ask(server, model, PROMPTS[0], max_tokens=4, bad_token_ids=[ids[0]])
    assert ids[0] not in banned.ids
    word = tokenizer.decode([ids[1]])
    assert ids[1] not in ask(server, model, PROMPTS[0], max_tokens=8, bad_words=[word]).ids
    assert ask(server, model, PROMPTS[0], max_tokens=3, logit_bias={"100": 100}).ids == [100, 100, 100]
    assert set(ask(server, model, PROMPTS[0], max_tokens=6, allowed_token_ids=[7, 9], ignore_eos=True).ids) <= {7, 9}
    penalised = ask(server, model, PROMPTS[0], max_tokens=16, repetition_penalty=5.0, ignore_eos=True).ids
    assert len(set(penalised)) == 16
    ended = ask(server, model, PROMPTS[0], max_tokens=16, stop_token_ids=[ids[2]])
    assert (ended.ids, ended.finish_reason, ended.stats["stop_reason"]) == (ids[:3], "stop", ids[2])
    later = ask(server, model, PROMPTS[0], max_tokens=16, stop_token_ids=[ids[2]], min_tokens=6)
    assert len(later.ids) >= 6
    assert ids[2] not in later.ids[:5]


def test_a_request_that_allows_no_token_fails_and_no_other(server: TritonServer, golden: dict[str, list[int]]) -> None:
    """STP-08."""
    with GrpcStream(server) as neighbour:
        neighbour.send("continuous", PROMPTS[1], max_tokens=16)
        with pytest.raises(Refused, match="the request's parameters allow no token at all") as error:
            ask(server, "continuous", PROMPTS[0], allowed_token_ids=[5], bad_token_ids=[5])
        assert error.value.code == "INTERNAL"
        assert neighbour.answer().ids == golden[PROMPTS[1]][:16]


def test_special_tokens_stand_in_the_text_on_request(server: TritonServer, tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id("<|im_end|>")
    for model in NATIVE:
        answer = ask(server, model, PROMPTS[0], max_tokens=2, logit_bias={str(end): 100}, skip_special_tokens=False)
        assert (answer.text, answer.ids) == ("<|im_end|>", [end]), model
    assert json.dumps(ask(server, "continuous", PROMPTS[0], max_tokens=2, logit_bias={str(end): 100}).text) == '""'


@pytest.mark.parametrize("model", CONTINUOUS)
def test_a_request_past_its_time_ends_with_what_it_has(
    server: TritonServer, golden: dict[str, list[int]], model: str
) -> None:
    answer = ask(server, model, PROMPTS[1], max_tokens=4000, ignore_eos=True, timeout_ms=600)
    assert answer.finish_reason == "timeout"
    assert 1 <= answer.num_output_tokens == len(answer.ids) < 1000
    assert answer.ids[:16] == golden[PROMPTS[1]][: len(answer.ids)]
    assert finished(server, "continuous", "timeout") >= 1


def test_a_request_whose_time_is_up_in_the_queue_is_refused(server: TritonServer) -> None:
    with GrpcStream(server) as running:
        for number in range(16):
            running.send("continuous", PROMPTS[0], request_id=str(number), stream=False, **CAUGHT)
        wait_for_running(server, "continuous", 16)
        with pytest.raises(Refused, match="deadline: still in the queue after") as error:
            ask(server, "continuous", PROMPTS[0], timeout_ms=50)
        assert error.value.code == "UNAVAILABLE"
        for _ in range(16):
            assert running.receive().finish_reason == "length"
