"""Lines of a batch's input: what they ask for, and what is refused before anything is sent."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.doors import fields as server_fields
from slipstream.errors import InvalidRequest
from slipstream_client.offline.answers import answer_line, read_answer
from slipstream_client.offline.fields import CHECKS, CONTINUOUS_ONLY, ROLES, BadField, check_sampling
from slipstream_client.offline.lines import BatchRequest, parse_line
from slipstream_client.tensors import Generation, RequestFailed, SamplingOptions

LIMITS = server_fields.Limits(max_model_len=1000, vocab_size=100)
CHAT = [{"role": "user", "content": "hi"}]


def parse(most: int | None = None, /, **values: Any) -> BatchRequest:
    return parse_line(json.dumps(values).encode(), 3, most)


def openai(url: str, **body: Any) -> BatchRequest:
    return parse(custom_id="c1", method="POST", url=url, body={"model": "m", **body})


def test_sampling_parameters_stand_beside_the_prompt_or_in_an_object_of_their_own() -> None:
    beside = parse(id="a", prompt="x", temperature=0, seed=None)
    inside = parse(id="a", prompt="x", sampling_parameters={"temperature": 0})
    assert (beside.prompt, beside.sampling) == ("x", {"temperature": 0})
    assert (inside.sampling, inside.digest) == (beside.sampling, beside.digest)


def test_a_line_without_an_id_is_named_by_its_number() -> None:
    assert parse(prompt="x").id == "line-3"
    assert parse(prompt="x", id=17).id == "17"


@pytest.mark.parametrize("name", ["input_ids", "prompt_token_ids"])
def test_token_ids_are_a_prompt(name: str) -> None:
    request = parse(**{name: [1, 2]})
    assert (request.prompt, request.input_ids, request.sampling) == (None, [1, 2], {})
    assert request.continuous_only == ["input_ids"]


def test_most_tokens_for_all_count_only_where_a_line_does_not_say() -> None:
    assert parse(5, prompt="x").sampling == {"max_tokens": 5}
    assert parse(5, prompt="x", max_tokens=7).sampling == {"max_tokens": 7}
    assert parse(5, prompt="x").digest != parse(6, prompt="x").digest


def test_a_digest_is_of_what_is_asked_and_not_of_how_it_is_written() -> None:
    one = parse_line(b'{"id": "a", "prompt": "x", "top_k": 3, "seed": 1}', 1)
    other = parse_line(b' {"seed":1,  "id": "a", "top_k": 3, "prompt": "\\u0078"}\r\n', 9)
    assert one.digest == other.digest
    changed = [parse(id="b", prompt="x"), parse(id="a", prompt="y"), parse(id="a", prompt="x", seed=2)]
    assert len({request.digest for request in (one, parse(id="a", prompt="x"), *changed)}) == 5


def test_openai_completions_are_mapped() -> None:
    request = openai("/v1/completions", prompt=["one"], max_tokens=4, stop="x", n=2, logprobs=3, echo=False, user="u")
    assert (request.id, request.form, request.model, request.prompt) == ("c1", "completion", "m", "one")
    assert request.sampling == {"max_tokens": 4, "stop": "x", "n": 2, "logprobs": 3}
    assert openai("/v1/completions", prompt=[[5, 6]]).input_ids == openai("/v1/completions", prompt=[5, 6]).input_ids


def test_openai_chats_are_mapped() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = openai(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": parts}],
        max_tokens=9,
        max_completion_tokens=4,
        logprobs=True,
        top_logprobs=2,
        response_format={"type": "text"},
    )
    assert request.sampling == {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 4, "logprobs": 2}
    assert openai("/v1/chat/completions", messages=CHAT, logprobs=False).sampling == {"messages": CHAT}
    assert openai("/v1/chat/completions", messages=CHAT, logprobs=True).sampling["logprobs"] == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "x"', "not valid JSON"),
        ("[1]", "[1] is no JSON object"),
        ('{"prompt": "x", "prompt": "y"}', "the key 'prompt' stands twice"),
        ('{"prompt": "x", "temperature": NaN}', "NaN is no number of JSON"),
        ("{}", "exactly one of prompt, messages, input_ids, prompt_token_ids is needed, not none"),
        ('{"prompt": "x", "input_ids": [1]}', "not prompt and input_ids"),
        ('{"prompt": ""}', "prompt is ''; it must not be empty"),
        ('{"prompt": 5}', "prompt is 5; it must be a string"),
        ('{"prompt": "\\ud800"}', "half a surrogate pair"),
        ('{"input_ids": [1, -2]}', "input_ids is [1, -2]; it must be a list of token ids"),
        ('{"prompt": "x", "id": ""}', "id is ''; it must be a string of 1 to 256 printable characters"),
        ('{"prompt": "x", "id": "a\\nb"}', "id is 'a\\nb'"),
        ('{"prompt": "x", "temprature": 1}', "unknown field 'temprature'; known are allowed_token_ids, bad_token_ids"),
        ('{"prompt": "x", "stream": true}', "unknown field 'stream'"),
        ('{"prompt": "x", "top_p": 1.5}', "top_p is 1.5; allowed are numbers from 0 to 1"),
        ('{"prompt": "x", "max_tokens": 0}', "max_tokens is 0; allowed are whole numbers from 1 up"),
        ('{"prompt": "x", "seed": 1e30}', "seed is 1e+30; allowed are whole numbers from 0 to 18446744073709551615"),
        ('{"prompt": "x", "seed": 1, "sampling_parameters": {"seed": 2}}', "seed stands beside sampling_parameters"),
        ('{"prompt": "x", "sampling_parameters": "{}"}', "sampling_parameters is '{}'; it must be an object"),
        ('{"messages": []}', "messages is []; it must be a list of objects"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "messages[0].role is 'tool'; allowed are system, user"),
        ('{"messages": [{"role": "user"}]}', "it must be an object of exactly role and content"),
        (
            '{"custom_id": "a", "url": "/v1/embeddings", "body": {}}',
            "url is '/v1/embeddings'; allowed are /v1/completi",
        ),
        ('{"custom_id": "a", "url": "/v1/completions"}', "body is None; it must be an object"),
        ('{"url": "/v1/completions", "body": {"prompt": "x"}}', "custom_id is missing"),
        ('{"custom_id": "a", "prompt": "x"}', "unknown field 'prompt'; known are custom_id, method, url, body"),
        ('{"custom_id": "a", "method": "GET", "body": {}}', "method is 'GET'; allowed is POST"),
    ],
)
def test_a_bad_line_is_refused_by_field_value_and_what_is_allowed(line: str, said: str) -> None:
    with pytest.raises(BadField) as refused:
        parse_line(line.encode(), 1)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("url", "body", "said"),
    [
        ("/v1/completions", {"prompt": ["a", "b"]}, "allowed is one string or one list of token ids"),
        ("/v1/completions", {"prompt": "a", "stream": True}, "stream is True; allowed is false"),
        ("/v1/completions", {"prompt": "a", "echo": True}, "echo is True; allowed is false"),
        ("/v1/completions", {"messages": CHAT}, "messages is no field of this url; it takes prompt"),
        ("/v1/chat/completions", {"prompt": "a"}, "prompt is no field of this url; it takes messages"),
        ("/v1/chat/completions", {"messages": CHAT, "tools": [{"type": "function"}]}, "allowed is []"),
        ("/v1/chat/completions", {"messages": CHAT, "top_logprobs": 2}, "allowed is 0 where logprobs is not true"),
        ("/v1/chat/completions", {"messages": CHAT, "logprobs": 2}, "logprobs is 2; it must be true or false"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "allowed is a string or parts of type text",
        ),
    ],
)
def test_what_an_openai_body_asks_for_and_nobody_can_do_is_refused(url: str, body: dict[str, Any], said: str) -> None:
    with pytest.raises(BadField) as refused:
        openai(url, **body)
    assert said in str(refused.value)


@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,\\abcdeinoprtm0129.-', max_size=60).map(str.encode))
def test_no_line_fails_in_another_way_than_by_being_refused(line: bytes) -> None:
    try:
        request = parse_line(line, 1)
    except BadField:
        return
    assert request.prompt or request.input_ids or request.sampling["messages"]


BOUNDARIES = (
    *(-1001, -1000, -101, -100, -3, -2, -2.5, -1.5, -1, 0, 0.005, 0.01, 0.5, 1, 1.0, 2, 3, 20, 21, 100, 101, 128, 129),
    *(1000, 1001, (1 << 64) - 1, 1 << 64, True, "", "x", "x" * 1024, "x" * 1025, [], [1], [-1], ["a"], ["a"] * 65, {}),
    *([1.5], [True], {"1": 3}, {"1": 101}, {"x": 1}, {"-1": 1}),
)
# What the model has no room for is the server's to say.
BY_THE_MODEL = ("max_tokens", "min_tokens", "stop_length", "top_k", "logit_bias")


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_a_field_has_the_range_that_the_server_gives_it(name: str) -> None:
    accepted = []
    for value in BOUNDARIES:
        here = there = True
        try:
            check_sampling({name: value})
        except BadField:
            here = False
        try:
            server_fields.parse_fields({name: value}, 0, LIMITS)
        except InvalidRequest:
            there = False
        if name in BY_THE_MODEL:
            assert here or not there, value
        else:
            assert here == there, value
        accepted.append(here)
    assert True in accepted
    assert False in accepted


def test_the_fields_are_those_of_the_server_and_of_the_clients() -> None:
    assert set(CHECKS) == set(server_fields._READERS)
    assert set(CHECKS) | {"messages", "prompt_token_ids"} == set(get_type_hints(SamplingOptions))


def test_what_text_models_refuse_is_what_their_doors_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", SimpleNamespace())
    for name in ("door", "metrics"):
        monkeypatch.delitem(sys.modules, f"slipstream.doors.{name}", raising=False)
    from slipstream.doors import chat, door

    assert door._REFUSED_BY_OTHERS == CONTINUOUS_ONLY
    assert chat.ROLES == ROLES


def scored(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": f" {token_id}", "bytes": [token_id]}


ANSWER = Generation(
    text=" 7",
    finish_reason="length",
    num_input_tokens=4,
    num_output_tokens=1,
    output_ids=None,
    stats=None,
    logprobs=[{"7": scored(7, -3.0, 5), "8": scored(8, -0.5, 1), "9": scored(9, -1.0, 2)}],
)


def test_an_answer_and_its_choices_in_our_own_form() -> None:
    request = parse(id="a", prompt="x", n=2)
    line = answer_line(
        request, Generation(" 7", "stop", 4, 1, None, None, others=(Generation(" 8 9", "length", 4, 2, None, None),))
    )
    assert line == {
        "id": "a",
        "text": " 7",
        "finish_reason": "stop",
        "num_input_tokens": 4,
        "num_output_tokens": 3,
        "choices": [
            {"index": 0, "text": " 7", "finish_reason": "stop", "num_output_tokens": 1},
            {"index": 1, "text": " 8 9", "finish_reason": "length", "num_output_tokens": 2},
        ],
        "request": request.digest,
    }
    assert read_answer(line) == ("a", request.digest, None)


def test_log_probabilities_in_openais_forms() -> None:
    chat = openai("/v1/chat/completions", messages=CHAT, logprobs=True, top_logprobs=2)
    body = answer_line(chat, ANSWER)["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": " 7"}
    assert choice["logprobs"]["content"] == [
        {
            "token": " 7",
            "logprob": -3.0,
            "bytes": [7],
            "top_logprobs": [
                {"token": " 8", "logprob": -0.5, "bytes": [8]},
                {"token": " 9", "logprob": -1.0, "bytes": [9]},
            ],
        }
    ]
    completion = openai("/v1/completions", prompt="x", logprobs=2)
    (choice,) = answer_line(completion, ANSWER)["response"]["body"]["choices"]
    assert choice == {
        "index": 0,
        "text": " 7",
        "finish_reason": "length",
        "logprobs": {
            "tokens": [" 7"],
            "token_logprobs": [-3.0],
            "top_logprobs": [{" 7": -3.0, " 8": -0.5, " 9": -1.0}],
            "text_offset": [0],
        },
    }


@pytest.mark.parametrize("form", ["own", "openai"])
def test_a_failure_has_its_code_and_is_read_back(form: str) -> None:
    request = parse(id="c1", prompt="x") if form == "own" else openai("/v1/completions", prompt="x")
    line = answer_line(request, RequestFailed("INVALID_ARGUMENT: too long"))
    assert line["error"] == {"code": "INVALID_ARGUMENT", "message": "too long"}
    assert json.dumps(line).startswith('{"id": "')
    assert read_answer(line) == ("c1", request.digest, "INVALID_ARGUMENT")
