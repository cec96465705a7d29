"""What no model can serve: a clear error that names field and value, and nothing else is lost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from helpers import (
    CAUGHT,
    NUM_GOLDEN,
    PROMPTS,
    STREAMING,
    GrpcStream,
    Refused,
    ask,
    ask_batch,
    ask_with,
    batch_inputs,
    flag_tensor,
    generate,
    generate_body,
    inputs_for,
    numpy_tensor,
    post,
    sampling_json,
    text_tensor,
)
from observing import wait_for_running
from slipstream_client.server.tritonserver import TritonServer

pytestmark = pytest.mark.server

MODELS = ("continuous", "continuous_unary", "dynamic", "iterative")
PROMPT = PROMPTS[0]
CONTEXT = 8192
VOCABULARY = 49152
MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Bad:
    """A request that is refused with a text that holds all of `says`."""

    says: tuple[str, ...]
    prompt: str | bytes = PROMPT
    sampling: bytes = b"{}"


def field(name: str, value: Any, *says: str) -> tuple[str, Bad]:
    """A bad value of one sampling parameter; the error names both."""
    text = json.dumps({name: value})
    return f"{name}={str(value)[:24]}", Bad((name, *says), sampling=text.encode())


def raw(label: str, sampling: bytes, *says: str) -> tuple[str, Bad]:
    return label, Bad(says, sampling=sampling)


NOT_SUPPORTED: Mapping[str, Any] = {
    "best_of": 2,
    "echo": True,
    "guided_decoding": {},
    "lora_name": "a",
}
BAD: Mapping[str, Bad] = dict(
    [
        ("empty prompt", Bad(("prompt is empty",), prompt="")),
        ("prompt beyond the context", Bad((str(CONTEXT), "prompt has 9001 tokens"), prompt="a" + " a" * 9000)),
        ("1 MB prompt", Bad(("text_input", str(MEGABYTE)), prompt="a" * MEGABYTE)),
        field("max_tokens", 0, "is 0", f"1 to {CONTEXT}"),
        field("max_tokens", -1, "is -1"),
        field("max_tokens", 1 << 63, f"is {1 << 63}"),
        field("max_tokens", CONTEXT, "max_tokens is 8192", "prompt of 3 tokens", "8189"),
        field("max_tokens", 1.5, "is 1.5", "whole number"),
        field("max_tokens", True, "is True", "number"),
        field("max_tokens", "five", "'five'", "number"),
        field("max_tokens", [5], "[5]"),
        raw("max_tokens of 5000 digits", b'{"max_tokens": ' + b"9" * 5000 + b"}", "sampling_parameters"),
        raw("max_tokens=1e999", b'{"max_tokens": 1e999}', "max_tokens", "inf"),
        raw("JSON that is none", b'{"max_tokens": ', "sampling_parameters is not valid JSON"),
        raw("JSON with a word", b"max_tokens", "sampling_parameters is not valid JSON"),
        raw("a list", b'[{"max_tokens": 1}]', "sampling_parameters", "must be a JSON object"),
        raw("a number", b"5", "sampling_parameters is 5", "must be a JSON object"),
        raw("null", b"null", "sampling_parameters is None", "must be a JSON object"),
        raw("a nested list without end", b"[" * 100_000, "sampling_parameters is not valid JSON"),
        raw("a key twice", b'{"max_tokens": 1, "max_tokens": 2}', "'max_tokens'", "twice"),
        raw("2 MB of JSON", b'{"max_tokens": 1' + b" " * 2 * MEGABYTE + b"}", "sampling_parameters", "bytes"),
        field("max_token", 5, "unknown field 'max_token'", "max_tokens"),
        raw("an unknown key of 5000 bytes", b'{"%s": 5}' % (b"x" * 5000), "unknown field 'xxx", "..."),
        raw("temperature=NaN", b'{"temperature": NaN}', "temperature is nan"),
        raw("temperature=Infinity", b'{"temperature": Infinity}', "temperature is inf"),
        raw("temperature=-Infinity", b'{"temperature": -Infinity}', "temperature is -inf"),
        field("temperature", "NaN", "'NaN'"),
        field("min_p", 1.5, "is 1.5"),
        field("min_tokens", 500, "is 500", "max_tokens"),
        field("repetition_penalty", 0, "is 0"),
        field("presence_penalty", "much", "'much'"),
        field("frequency_penalty", True, "is True"),
        field("logit_bias", {"5": 101}, "logit_bias['5'] is 101"),
        field("allowed_token_ids", [10**9], "is 1000000000"),
        field("bad_words", [""], "has ''"),
        field("temperature", -0.5, "is -0.5"),
        field("temperature", "hot", "'hot'"),
        field("temperature", False, "False"),
        field("top_p", 1.5, "is 1.5", "0 to 1"),
        field("top_p", -0.1, "is -0.1"),
        field("top_k", 0.5, "is 0.5", "whole number"),
        field("top_k", -2, "is -2"),
        field("top_k", VOCABULARY + 1, str(VOCABULARY + 1)),
        field("seed", -1, "is -1"),
        field("seed", 1 << 64, f"is {1 << 64}"),
        field("seed", 0.5, "is 0.5"),
        field("stop_token_ids", [VOCABULARY], f"is {VOCABULARY}", f"0 to {VOCABULARY - 1}"),
        field("stop_token_ids", [1, -1], "is -1"),
        field("stop_token_ids", 5, "is 5", "list"),
        field("stop_token_ids", ["a"], "'a'"),
        field("stop_length", 0, "is 0"),
        field("ignore_eos", "yes", "'yes'", "true or false"),
        field("ignore_eos", 1, "is 1"),
        field("return_token_ids", "true", "'true'"),
        *(field(name, value, f"{name} is not supported") for name, value in NOT_SUPPORTED.items()),
    ]
)
# JSON cannot carry these; over HTTP the server itself answers.
BAD_BYTES: Mapping[str, Bad] = {
    "invalid UTF-8": Bad(("text_input is not valid UTF-8", "byte 3"), prompt=b"abc\xff\xfe"),
    "half a character": Bad(("text_input is not valid UTF-8",), prompt="é".encode()[:1]),
    "a surrogate in UTF-8": Bad(("text_input is not valid UTF-8",), prompt=b"\xed\xa0\xbd"),
    "invalid UTF-8 in the JSON": Bad(("sampling_parameters is not valid JSON",), sampling=b'{"\xff": 1}'),
}


def bad_inputs(model: str, bad: Bad) -> list[Any]:
    return inputs_for(model, bad.prompt, bad.sampling)


def check_over_grpc(server: TritonServer, model: str, bad: Bad) -> None:
    with pytest.raises(Refused) as error:
        ask_with(server, model, bad_inputs(model, bad))
    assert all(text in error.value.text for text in bad.says), error.value.text
    assert len(error.value.text) < 600, "what was sent is echoed"
    assert error.value.code == "INVALID_ARGUMENT"


def check_over_http(server: TritonServer, model: str, bad: Bad) -> None:
    assert isinstance(bad.prompt, str)
    body = {"text_input": bad.prompt, "sampling_parameters": bad.sampling.decode()}
    status, answer = generate(server, model, body)
    assert (status, list(answer)) == (400, ["error"])
    assert all(text in answer["error"] for text in bad.says), answer


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_with_field_and_value(server: TritonServer, bad: Bad) -> None:
    for model in MODELS:
        check_over_grpc(server, model, bad)
        check_over_http(server, model, bad)


@pytest.mark.parametrize("bad", BAD_BYTES.values(), ids=BAD_BYTES.keys())
def test_bytes_that_are_no_text_are_refused(server: TritonServer, bad: Bad) -> None:
    for model in MODELS:
        check_over_grpc(server, model, bad)


@pytest.mark.parametrize("model", MODELS)
def test_odd_but_good_input_is_served(server: TritonServer, golden: dict[str, list[int]], model: str) -> None:
    for odd in (
        {"max_tokens": "2"},
        {"max_tokens": 2.0},
        {"max_tokens": 2, "top_k": -1, "top_p": 1, "seed": (1 << 64) - 1, "stop_token_ids": []},
        {"max_tokens": 2, "top_k": None, "stop_length": None},
        {"max_tokens": CONTEXT - 3, "stop_length": 2},
        {"stop_length": 2},
        {"max_tokens": 2, "temperature": "0.0"},
    ):
        assert ask(server, model, PROMPT, **odd).ids == golden[PROMPT][:2]
    if model != "dynamic":
        # An empty text stands for no parameters at all: whatever is sampled, the prompt is the same.
        answer = ask_with(server, model, inputs_for(model, PROMPT, b'{"max_tokens": 1}'))
        assert (answer.num_input_tokens, answer.num_output_tokens) == (3, 1)


@pytest.mark.parametrize("model", MODELS)
def test_a_good_request_beside_all_the_bad_ones_gets_its_answer(
    server: TritonServer, golden: dict[str, list[int]], model: str
) -> None:
    everything_bad = [*BAD.values(), *BAD_BYTES.values()]
    engine = "continuous" if model == "continuous_unary" else model
    with ThreadPoolExecutor(8) as pool:
        good = [pool.submit(ask, server, model, prompt, **CAUGHT) for prompt in PROMPTS[:2]]
        wait_for_running(server, engine, 2)
        list(pool.map(lambda bad: check_over_grpc(server, model, bad), everything_bad))
        assert [answer.result().ids[:NUM_GOLDEN] for answer in good] == [golden[prompt] for prompt in PROMPTS[:2]]


def test_bad_rows_of_a_dynamic_batch_fail_alone(server: TritonServer, golden: dict[str, list[int]]) -> None:
    bad = [BAD["empty prompt"], BAD["max_tokens=0"], BAD["a list"], BAD_BYTES["invalid UTF-8"]]
    with ThreadPoolExecutor(13) as pool:
        # Behind a running batch, so that the rest becomes one batch.
        first = pool.submit(ask, server, "dynamic", PROMPT, **CAUGHT)
        wait_for_running(server, "dynamic", 1)
        good = [pool.submit(ask, server, "dynamic", prompt, max_tokens=4) for prompt in PROMPTS]
        refused = [pool.submit(check_over_grpc, server, "dynamic", case) for case in bad]
        assert [answer.result().ids for answer in good] == [golden[prompt][:4] for prompt in PROMPTS]
        assert first.result().ids[:NUM_GOLDEN] == golden[PROMPT]
        for case in refused:
            case.result()


def test_a_bad_row_of_a_client_batch_is_named(server: TritonServer) -> None:
    with pytest.raises(Refused, match=r"^row 1: max_tokens is 0") as error:
        ask_batch(server, PROMPTS[:3], [sampling_json(max_tokens=number) for number in (1, 0, 1)])
    assert error.value.code == "INVALID_ARGUMENT"


INT32 = np.int32
CONTINUOUS_ONLY: Mapping[str, tuple[Callable[[], list[Any]], str]] = {
    "neither text nor ids": (
        lambda: [text_tensor("sampling_parameters", ["{}"], [1])],
        "exactly one of text_input, input_ids, prompt_token_ids, messages is needed",
    ),
    "both text and ids": (
        lambda: [text_tensor("text_input", ["a"], [1]), numpy_tensor("input_ids", np.array([1], INT32), "INT32")],
        "exactly one of text_input, input_ids, prompt_token_ids, messages is needed",
    ),
    "no ids": (lambda: [numpy_tensor("input_ids", np.array([], INT32), "INT32")], "the prompt is empty"),
    "an id outside the vocabulary": (
        lambda: [numpy_tensor("input_ids", np.array([1, VOCABULARY], INT32), "INT32")],
        f"input_ids has {VOCABULARY}; token ids are 0 to {VOCABULARY - 1}",
    ),
    "a negative id": (
        lambda: [numpy_tensor("input_ids", np.array([-1, 5], INT32), "INT32")],
        "input_ids has -1; token ids are 0 to",
    ),
    "as many ids as the context": (
        lambda: [numpy_tensor("input_ids", np.zeros(CONTEXT, INT32), "INT32")],
        f"the prompt has {CONTEXT} tokens",
    ),
    "cancel without an id": (lambda: [flag_tensor("cancel")], "cancel: no running request has the id ''"),
}


@pytest.mark.parametrize(("inputs", "says"), CONTINUOUS_ONLY.values(), ids=CONTINUOUS_ONLY.keys())
def test_inputs_that_do_not_make_a_request_are_refused(
    server: TritonServer, inputs: Callable[[], list[Any]], says: str
) -> None:
    for model in ("continuous", "continuous_unary"):
        with pytest.raises(Refused) as error:
            ask_with(server, model, inputs())
        assert error.value.text.startswith(says)


WRONG_TENSORS: Mapping[str, Callable[[list[int]], list[Any]]] = {
    "text as numbers": lambda shape: [numpy_tensor("text_input", np.zeros(shape, INT32), "INT32")],
    "two texts": lambda shape: [text_tensor("text_input", ["a", "b"], [*shape[:-1], 2])],
    "no text": lambda shape: [text_tensor("text_input", [], [*shape[:-1], 0])],
    "three dimensions": lambda shape: [text_tensor("text_input", ["a"], [1, 1, 1])],
    "an unknown input": lambda shape: [text_tensor("text_input", ["a"], shape), text_tensor("foo", ["a"], shape)],
    "the text twice": lambda shape: [text_tensor("text_input", ["a"], shape)] * 2,
}


@pytest.mark.parametrize("make", WRONG_TENSORS.values(), ids=WRONG_TENSORS.keys())
def test_tensors_of_a_wrong_type_or_shape_are_refused_by_the_server(
    server: TritonServer, make: Callable[[list[int]], list[Any]]
) -> None:
    for model in MODELS:
        shape = [1] if model.startswith("continuous") else [1, 1]
        inputs = [*make(shape), text_tensor("sampling_parameters", ["{}"], shape)]
        with pytest.raises(Refused) as error:
            ask_with(server, model, inputs)
        # It is Triton's own refusal, whose code a stream does not carry.
        assert error.value.code == (None if model in STREAMING else "INVALID_ARGUMENT")


MALFORMED_BYTES = {
    "nothing": b"",
    "no length": b"abc",
    "bytes left over": b"\x02\x00\x00\x00abc",
    "more elements than the shape": b"\x01\x00\x00\x00a\x01\x00\x00\x00b",
}
BEYOND_THE_END = b"\xff\xff\xff\xffabc"


@pytest.mark.parametrize("model", MODELS)
def test_malformed_bytes_are_refused_by_name_and_those_beside_them_are_served(
    server: TritonServer, golden: dict[str, list[int]], model: str
) -> None:
    """VAL-05: all but a length beyond the end where Triton batches; see the README."""
    malformed = [*MALFORMED_BYTES.values(), *([BEYOND_THE_END] if model.startswith("continuous") else [])]
    shape = [1] if model.startswith("continuous") else [1, 1]

    def check(case: tuple[str, bytes]) -> None:
        name, content = case
        tensors = {"text_input": PROMPT, "sampling_parameters": "{}"}
        inputs = {each: text_tensor(each, [value], shape) for each, value in tensors.items()}
        inputs[name]._raw_content = content
        with pytest.raises(Refused, match=name):
            ask_with(server, model, list(inputs.values()))

    cases = [(name, bad) for name in ("text_input", "sampling_parameters") for bad in malformed]
    with ThreadPoolExecutor(len(cases) + len(PROMPTS)) as pool:
        good = [pool.submit(ask, server, model, prompt, max_tokens=4) for prompt in PROMPTS]
        list(pool.map(check, cases))
        assert [answer.result().ids for answer in good] == [golden[prompt][:4] for prompt in PROMPTS]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b'{"text_input": "\\ud83d"}', b'{"text_input": null}'])
def test_an_http_body_that_is_no_request_is_refused_by_the_server(server: TritonServer, body: bytes) -> None:
    for model in MODELS:
        status, text = post(server, f"models/{model}/generate", body)
        assert status in (400, 500)
        assert json.loads(text)["error"]


def test_unknown_request_parameters_are_refused_by_name(server: TritonServer) -> None:
    body = {"text_input": PROMPT, "sampling_parameters": "{}", "foo": 3}
    for model in MODELS:
        status, answer = generate(server, model, body)
        assert status == 400
        assert answer["error"].startswith("INVALID_ARGUMENT: unknown field 'foo'")


def test_a_megabyte_is_refused_in_no_time_and_holds_up_nobody(
    server: TritonServer, golden: dict[str, list[int]]
) -> None:
    """Also the longest text that is not refused by its bytes alone is tokenized in bearable time."""
    with GrpcStream(server) as stream:
        stream.send("continuous", PROMPT, max_tokens=16)
        stream.receive()
        start = time.monotonic()
        check_over_http(server, "continuous", BAD["1 MB prompt"])
        body = generate_body("continuous", "é" * 131_072)
        assert generate(server, "continuous", body)[0] == 400
        assert time.monotonic() - start < 5
        stream.collect()


def test_a_batch_input_of_another_size_than_its_neighbour_is_refused_by_the_server(server: TritonServer) -> None:
    text, sampling = batch_inputs([PROMPT] * 2, [b"{}"])
    with pytest.raises(Refused) as error:
        ask_with(server, "static", [text, sampling])
    assert error.value.code == "INVALID_ARGUMENT"


@pytest.mark.parametrize("model", ["static", "dynamic", "iterative"])
def test_a_length_beyond_the_end_is_refused_by_name_where_triton_batches(server: TritonServer, model: str) -> None:
    """VAL-05: sent alone, since Triton gives every request of its batch the same error."""
    for index, name in enumerate(("text_input", "sampling_parameters")):
        inputs = inputs_for(model, PROMPT, b"{}")
        inputs[index]._raw_content = BEYOND_THE_END
        with pytest.raises(Refused, match=f"incomplete string data for inference input '{name}'"):
            ask_with(server, model, inputs)
