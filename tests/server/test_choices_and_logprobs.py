"""Several answers to one prompt and log-probabilities, through the real doors and every client."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any

import pytest
from tokenizers import Tokenizer

from helpers import (
    CAUGHT,
    NUM_GOLDEN,
    PROMPTS,
    GrpcStream,
    Refused,
    Response,
    ask,
    flag_tensor,
    generate,
    generate_body,
    generate_stream,
    inputs_for,
    sampling_json,
)
from observing import engine_status, wait_for_running, wait_until
from slipstream_client.aio import AsyncSlipstreamClient
from slipstream_client.client import SlipstreamClient
from slipstream_client.http_client import HttpSlipstreamClient
from slipstream_client.server.tritonserver import TritonServer
from slipstream_client.tensors import Generation

pytestmark = pytest.mark.server

DRAWN = {"max_tokens": 12, "temperature": 1.0, "seed": 11, "ignore_eos": True}


@pytest.fixture(scope="module")
def choices(shared_server: TritonServer) -> list[Generation]:
    """Three answers, as whole ones."""
    with SlipstreamClient(shared_server.grpc_url) as client:
        first = client.generate(PROMPTS[4], n=3, return_token_ids=True, **DRAWN)  # type: ignore[arg-type]
    return [first, *first.others]


def responses_of(server: TritonServer, model: str, *flags: str, **sampling: Any) -> list[Response]:
    """All responses to one streamed request that asks for more outputs than usual."""
    inputs = inputs_for(model, PROMPTS[4], sampling_json(**sampling))
    with GrpcStream(server) as stream:
        return stream.send(model, inputs=[*inputs, *map(flag_tensor, flags)]).collect()


def test_choices_differ_and_the_first_is_that_of_a_request_alone(
    server: TritonServer, choices: list[Generation]
) -> None:
    assert len({choice.text for choice in choices}) == 3
    assert choices[0].output_ids == ask(server, "continuous", PROMPTS[4], **DRAWN).ids
    assert [choice.num_output_tokens for choice in choices] == [12] * 3
    assert len({choice.num_input_tokens for choice in choices}) == 1


@pytest.mark.parametrize("model", ["continuous", "continuous_unary"])
@pytest.mark.parametrize("over_http", [False, True])
def test_choices_are_the_same_streamed_or_whole_by_any_client(
    server: TritonServer, choices: list[Generation], model: str, over_http: bool
) -> None:
    client: Any = (
        HttpSlipstreamClient(server.http_url, model) if over_http else SlipstreamClient(server.grpc_url, model)
    )
    whole = client.generate(PROMPTS[4], n=3, **DRAWN)
    assert [choice.text for choice in (whole, *whole.others)] == [choice.text for choice in choices]
    streamed = Generation.of_chunks(client.stream(PROMPTS[4], n=3, **DRAWN))
    assert [choice.text for choice in (streamed, *streamed.others)] == [choice.text for choice in choices]
    assert [choice.finish_reason for choice in (streamed, *streamed.others)] == ["length"] * 3
    if not over_http:
        client.close()


async def collect(server: TritonServer) -> Generation:
    async with AsyncSlipstreamClient(server.grpc_url) as client:
        return Generation.of_chunks([chunk async for chunk in client.stream(PROMPTS[4], n=3, **DRAWN)])  # type: ignore[arg-type]


def test_the_asyncio_client_tells_choices_apart(server: TritonServer, choices: list[Generation]) -> None:
    import asyncio

    answer = asyncio.run(collect(server))
    assert [choice.text for choice in (answer, *answer.others)] == [choice.text for choice in choices]


def test_a_stream_has_one_choice_in_a_response_and_ends_once(server: TritonServer) -> None:
    responses = responses_of(server, "continuous", n=3, **DRAWN)
    assert all(len(values) == 1 for response in responses for values in response.outputs.values())
    assert [response.final for response in responses] == [False] * (len(responses) - 1) + [True]
    reasons = defaultdict(list)
    for response in responses:
        reasons[response.outputs["choice_index"][0]].append(response.finish_reason)
    assert sorted(reasons) == [0, 1, 2]
    assert all(each == [""] * (len(each) - 1) + ["length"] for each in reasons.values())


def test_a_whole_answer_has_all_choices_side_by_side(server: TritonServer, choices: list[Generation]) -> None:
    status, answer = generate(server, "continuous", generate_body("continuous", PROMPTS[4], n=3, **DRAWN))
    assert status == 200
    assert answer["text_output"] == [choice.text for choice in choices]
    assert answer["choice_index"] == [0, 1, 2]
    assert answer["num_output_tokens"] == [12, 12, 12]
    assert isinstance(answer["num_input_tokens"], int)
    assert [json.loads(stats)["num_output_tokens"] for stats in answer["stats"]] == [12] * 3


def test_one_choice_has_no_index(server: TritonServer) -> None:
    (*_, last) = responses_of(server, "continuous", n=1, **DRAWN)
    assert "choice_index" not in last.outputs


def test_a_stop_string_ends_its_choice_alone(server: TritonServer, choices: list[Generation]) -> None:
    stop = choices[1].text[8:14]
    assert all(stop not in choice.text for choice in (choices[0], choices[2]))
    with SlipstreamClient(server.grpc_url) as client:
        answer = client.generate(PROMPTS[4], n=3, stop=stop, **DRAWN)  # type: ignore[arg-type]
    expected = [choices[0].text, choices[1].text[: choices[1].text.index(stop)], choices[2].text]
    assert [choice.text for choice in (answer, *answer.others)] == expected
    assert [choice.finish_reason for choice in (answer, *answer.others)] == ["length", "stop", "length"]


def test_the_prompt_is_repeated_before_each_choice_where_it_is_wanted(server: TritonServer) -> None:
    body = generate_body("continuous", PROMPTS[4], n=2, **DRAWN) | {"exclude_input_in_output": False}
    _, answer = generate(server, "continuous", body)
    assert all(text.startswith(PROMPTS[4]) for text in answer["text_output"])


def test_cancelling_after_one_choice_has_finished_ends_the_others(server: TritonServer) -> None:
    """CAN-07: one choice is stopped early by a stop string, the others would go on for long."""
    sampling = {"n": 3, "temperature": 1.0, "seed": 11, "max_tokens": 800, "ignore_eos": True}
    with SlipstreamClient(server.grpc_url) as client:
        short = client.generate(PROMPTS[4], **(sampling | {"max_tokens": 12}))  # type: ignore[arg-type]
        stop = short.others[0].text[8:14]
    responses: list[Response] = []
    with GrpcStream(server) as stream:
        stream.send("continuous", PROMPTS[4], request_id="choices", stop=[stop], **sampling)
        while not responses or not responses[-1].finish_reason:
            responses.append(stream.receive())
        assert responses[-1].outputs["choice_index"] == [1]
        assert engine_status(server, "continuous")["running"] == 2
        with GrpcStream(server) as other:
            other.send("continuous", inputs=[flag_tensor("cancel")], request_id="choices")
            other.receive()
        with pytest.raises(Refused, match="cancelled"):
            stream.collect()
        assert stream.quiet
    wait_until(lambda: engine_status(server, "continuous")["kv_blocks_used"] == 0, "the blocks are free")


def test_siblings_refuse_what_they_do_not_have(server: TritonServer) -> None:
    for model in ("static", "dynamic", "iterative"):
        for field in ("n", "logprobs", "prompt_logprobs"):
            with pytest.raises(Refused, match=f"{field} is not supported by this model"):
                ask(server, model, PROMPTS[0], max_tokens=4, **{field: 2})


def test_more_choices_than_seats_take_turns(server: TritonServer) -> None:
    with SlipstreamClient(server.grpc_url) as client:
        answer = client.generate(PROMPTS[0], n=40, max_tokens=4, temperature=1.0, seed=3, ignore_eos=True)
    assert len(answer.others) == 39
    assert all(choice.num_output_tokens == 4 for choice in answer.others)


# --- log-probabilities


@pytest.mark.parametrize("stop", [None, "never said, but held back"])
def test_every_response_has_one_entry_for_each_of_its_tokens(
    server: TritonServer, golden: dict[str, list[int]], stop: str | None
) -> None:
    """CHK-04, STP-03: the entry is the sampled token's, and it joins to the text byte for byte."""
    responses = responses_of(
        server,
        "continuous",
        "return_logprobs",
        "return_cumulative_logprob",
        max_tokens=NUM_GOLDEN,
        logprobs=2,
        stop=stop,
    )
    entries = []
    for response in responses:
        new = json.loads(response.outputs["logprobs"][0])
        assert len(new) == response.outputs["num_output_tokens"][0]
        entries += new
        total = sum(next(iter(entry.values()))["logprob"] for entry in entries)
        assert math.isclose(response.outputs["cumulative_logprob"][0], total, rel_tol=1e-5)
    assert [int(next(iter(entry))) for entry in entries] == golden[PROMPTS[4]]
    assert all(len(entry) == 2 for entry in entries), "a greedy token is among the likeliest"
    spelled = b"".join(bytes(next(iter(entry.values()))["bytes"]) for entry in entries)
    assert spelled.decode() == "".join(response.text for response in responses)


def test_a_prompts_scores_come_once_and_first(server: TritonServer, tokenizer: Tokenizer) -> None:
    """TXT-11: the first token has none, all others finite ones, and they spell the prompt."""
    prompt = "\n\n" + PROMPTS[4]
    inputs = inputs_for("continuous", prompt, sampling_json(max_tokens=6, prompt_logprobs=1))
    with GrpcStream(server) as stream:
        responses = stream.send("continuous", inputs=[*inputs, flag_tensor("return_prompt_logprobs")]).collect()
    scored = [json.loads(response.outputs["prompt_logprobs"][0]) for response in responses]
    assert scored[1:] == [None] * (len(responses) - 1)
    assert scored[0][0] is None
    own = [next(iter(entry.items())) for entry in scored[0][1:]]
    assert [int(token_id) for token_id, _ in own] == tokenizer.encode(prompt).ids[1:]
    assert all(math.isfinite(entry["logprob"]) for _, entry in own)
    spelled = "".join(entry["decoded_token"] for _, entry in own)
    assert tokenizer.decode(tokenizer.encode(prompt).ids[:1]) + spelled == prompt


def test_a_prompt_of_one_token_has_no_scores_but_its_place(server: TritonServer) -> None:
    with SlipstreamClient(server.grpc_url) as client:
        assert client.generate(input_ids=[504], max_tokens=2, prompt_logprobs=0).prompt_logprobs == [None]


def test_scores_are_null_where_nobody_asked_for_them(server: TritonServer) -> None:
    flags = ("return_logprobs", "return_prompt_logprobs", "return_cumulative_logprob")
    responses = responses_of(server, "continuous", *flags, max_tokens=4, ignore_eos=True)
    for response in responses:
        assert response.outputs["logprobs"] == ["null"]
        assert response.outputs["prompt_logprobs"] == ["null"]
        assert response.outputs["cumulative_logprob"][0] < 0


def test_scores_are_the_same_over_http_and_over_a_plain_call(server: TritonServer) -> None:
    wanted: Any = {"max_tokens": 6, "temperature": 0.0, "logprobs": 1, "prompt_logprobs": 1}
    with SlipstreamClient(server.grpc_url) as client:
        expected = client.generate(PROMPTS[1], **wanted)
    assert expected.logprobs is not None
    with SlipstreamClient(server.grpc_url, "continuous_unary") as client:
        unary = client.generate(PROMPTS[1], **wanted)
    http = HttpSlipstreamClient(server.http_url).generate(PROMPTS[1], **wanted)
    for answer in (unary, http):
        assert answer.logprobs == expected.logprobs
        assert answer.prompt_logprobs == expected.prompt_logprobs


def test_events_carry_scores_too(server: TritonServer) -> None:
    body = generate_body("continuous", PROMPTS[4], stream=True, max_tokens=5, logprobs=0, ignore_eos=True)
    status, events = generate_stream(server, "continuous", body | {"return_logprobs": True})
    assert status == 200
    assert sum(len(json.loads(event["logprobs"])) for event in events) == 5


def test_a_bad_number_of_alternatives_is_refused_and_nothing_else_is_lost(server: TritonServer) -> None:
    """CHK-05: while another request runs."""
    with GrpcStream(server) as stream:
        stream.send("continuous", PROMPTS[0], **CAUGHT)
        wait_for_running(server, "continuous", 1)
        for value in (-1, 21, 49153, True, 2.5):
            with pytest.raises(Refused, match="logprobs is") as refused:
                ask(server, "continuous", PROMPTS[1], max_tokens=4, logprobs=value)
            assert refused.value.code == "INVALID_ARGUMENT"
        assert stream.answer().num_output_tokens == CAUGHT["max_tokens"]
