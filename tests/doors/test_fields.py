"""Every field of a request has a fixed verdict for every value: a meaning, or a refusal that names the field."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.doors.fields import (
    _READERS,
    Limits,
    RequestFields,
    check_token_ids,
    list_of_ids,
    parse_fields,
    read_values,
)
from slipstream.engine.request import SamplingParams
from slipstream.errors import InvalidRequest

VOCAB_SIZE = 1000
LIMITS = Limits(max_model_len=512, vocab_size=VOCAB_SIZE)
PROMPT = 12
ROOM = LIMITS.max_model_len - PROMPT


def parse(text: str | bytes | None = None, /, parameters: dict[str, Any] | None = None, **values: Any) -> RequestFields:
    """Parse JSON text, or the given values as JSON."""
    if text is None and values:
        text = json.dumps(values)
    encoded = text.encode() if isinstance(text, str) else text
    return parse_fields(read_values(encoded, parameters or {}), PROMPT, LIMITS)


def refusal(*args: Any, **values: Any) -> str:
    with pytest.raises(InvalidRequest) as error:
        parse(*args, **values)
    return str(error.value)


# --- what absence means


def test_fields_left_out_have_their_defaults() -> None:
    fields = parse(seed=1)
    assert fields.sampling == SamplingParams(max_tokens=256, temperature=1.0, top_k=0, top_p=1.0, seed=1)
    assert (fields.return_token_ids, fields.cache_salt, fields.ignored) == (False, "", ())


def test_what_an_engine_has_no_use_for_is_taken_and_named() -> None:
    limits = replace(LIMITS, ignored=frozenset(["cache_salt"]))
    assert parse_fields({"cache_salt": "a", "seed": 1}, 10, limits).ignored == ("cache_salt",)
    assert parse(cache_salt="a").cache_salt == "a"
    assert parse(cache_salt="a").ignored == ()


@pytest.mark.parametrize("text", [None, b"", "{}", " { } "])
def test_no_parameters_are_none_given(text: str | bytes | None) -> None:
    """SAM-12: an empty object works."""
    assert parse(text).sampling.max_tokens == 256


def test_null_is_the_same_as_left_out() -> None:
    """LEN-04."""
    names = ["max_tokens", "temperature", "top_k", "top_p", "ignore_eos", "stop_token_ids", "stop_length", "seed"]
    fields = parse(json.dumps(dict.fromkeys(names)))
    assert (fields.sampling.max_tokens, fields.sampling.temperature) == (256, 1.0)
    assert parse('{"logprobs": null}').sampling.max_tokens == 256
    assert "unknown field 'nonsense'" in refusal('{"nonsense": null}')


def test_each_request_without_a_seed_gets_one_of_its_own() -> None:
    seeds = {parse().sampling.seed for _ in range(50)}
    assert len(seeds) == 50
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize(("prompt", "max_tokens"), [(1, 256), (256, 256), (257, 255), (511, 1)])
def test_max_tokens_left_out_is_capped_by_the_context(prompt: int, max_tokens: int) -> None:
    """LEN-02: a prompt one shorter than the context gets exactly one token."""
    assert parse_fields({}, prompt, LIMITS).sampling.max_tokens == max_tokens


@pytest.mark.parametrize("prompt", [512, 513, 100_000])
def test_a_prompt_without_room_for_a_token_is_refused_with_the_numbers(prompt: int) -> None:
    """LEN-01, LEN-02."""
    for text in (b"{}", b'{"max_tokens": 1}'):
        with pytest.raises(InvalidRequest, match=f"the prompt has {prompt} tokens; .* at most 512 are allowed"):
            parse_fields(read_values(text, {}), prompt, LIMITS)


def test_prompt_and_max_tokens_beyond_the_context_are_refused_with_the_numbers() -> None:
    assert parse(max_tokens=ROOM).sampling.max_tokens == ROOM
    assert refusal(max_tokens=ROOM + 1) == (
        f"max_tokens is {ROOM + 1}; with a prompt of {PROMPT} tokens at most {ROOM} are allowed (context of 512)"
    )


# --- what is accepted


@pytest.mark.parametrize(
    ("name", "value", "meaning"),
    [
        ("max_tokens", 1, 1),
        ("max_tokens", "5", 5),
        ("max_tokens", 5.0, 5),
        ("temperature", 0, 0.0),
        ("temperature", -0.0, 0.0),
        ("temperature", 1e-40, 1e-40),
        ("temperature", 1e30, 1e30),
        ("temperature", "0.7", 0.7),
        ("temperature", "1e-3", 1e-3),
        ("top_k", 0, 0),
        ("top_k", -1, 0),
        ("top_k", 5.0, 5),
        ("top_k", 1000, 1000),
        ("top_p", 0, 0.0),
        ("top_p", 0.0, 0.0),
        ("top_p", 1, 1.0),
        ("seed", 0, 0),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("seed", str(2**64 - 1), 2**64 - 1),
        ("ignore_eos", False, False),
        ("ignore_eos", True, True),
        ("stop_token_ids", [], ()),
        ("stop_token_ids", [0, 999, "7"], (0, 999, 7)),
        ("min_p", 0, 0.0),
        ("min_p", "0.5", 0.5),
        ("repetition_penalty", 1, 1.0),
        ("repetition_penalty", 0.01, 0.01),
        ("frequency_penalty", -2, -2.0),
        ("presence_penalty", 2, 2.0),
        ("logit_bias", {}, {}),
        ("logit_bias", {"0": -100, "999": 0.5}, {0: -100.0, 999: 0.5}),
        ("allowed_token_ids", [5, 7], (5, 7)),
        ("min_tokens", 0, 0),
        ("min_tokens", 256, 256),
        ("stop_length", 1, 1),
        ("stop_length", 512, 512),
    ],
)
def test_a_value_in_range_means_what_it_says(name: str, value: Any, meaning: Any) -> None:
    """SAM-05, SAM-06, SAM-11, SAM-15: zero, false and the empty list are values; whole floats are whole numbers."""
    read = getattr(parse(**{name: value}).sampling, name)
    assert read == meaning
    assert type(read) is type(meaning)


def test_fields_of_the_text() -> None:
    """STP-14: an empty list is no stop string; one string is a list of one; twice is once."""
    assert parse(stop=[]).stop == ()
    assert parse(stop="a").stop == ("a",)
    fields = parse(stop=["b", "a", "b"], include_stop_str_in_output=True, bad_words="no", skip_special_tokens=False)
    assert (fields.stop, fields.include_stop_str_in_output) == (("b", "a"), True)
    assert (fields.bad_words, fields.skip_special_tokens) == (("no",), False)
    assert (parse(timeout_ms=250).timeout_ms, parse().timeout_ms) == (250.0, None)
    assert parse(bad_token_ids=[4, 5]).sampling.bad_sequences == ((4,), (5,))


def test_what_a_model_cannot_do_is_refused_by_name() -> None:
    limits = replace(LIMITS, refused=frozenset(["stop"]))
    with pytest.raises(InvalidRequest, match="stop is not supported by this model; `continuous`"):
        parse_fields({"stop": "a"}, 10, limits)
    assert parse_fields({"stop": None}, 10, limits).stop == ()


# --- what is refused


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("max_tokens", 0, "allowed are 1 to 512"),
        ("max_tokens", -1, "allowed are 1 to 512"),
        ("max_tokens", 2**63, "allowed are 1 to 512"),
        ("max_tokens", 1e300, "allowed are 1 to 512"),
        ("max_tokens", 1.5, "a whole number"),
        ("max_tokens", "five", "a number"),
        ("max_tokens", "", "a number"),
        ("max_tokens", True, "a number"),
        ("max_tokens", [5], "a number"),
        ("max_tokens", {"value": 5}, "a number"),
        ("temperature", -1, "finite numbers from 0 up"),
        ("temperature", -1e-300, "finite numbers from 0 up"),
        ("temperature", "nan", "finite numbers from 0 up"),
        ("temperature", "inf", "finite numbers from 0 up"),
        ("temperature", float("nan"), "finite numbers from 0 up"),
        ("temperature", float("inf"), "finite numbers from 0 up"),
        ("temperature", 10**400, "finite numbers from 0 up"),
        ("temperature", True, "a number"),
        ("temperature", False, "a number"),
        ("temperature", "", "a number"),
        ("top_k", 0.01, "a whole number"),
        ("top_k", -2, "allowed are -1 to 1000"),
        ("top_k", 1001, "allowed are -1 to 1000"),
        ("top_k", False, "a number"),
        ("top_k", "inf", "a whole number"),
        ("top_p", 1.0000001, "allowed are 0 to 1"),
        ("top_p", -0.1, "allowed are 0 to 1"),
        ("top_p", 10**400, "allowed are 0 to 1"),
        ("top_p", False, "a number"),
        ("seed", -1, "allowed are 0 to 18446744073709551615"),
        ("seed", 2**64, "allowed are 0 to 18446744073709551615"),
        ("seed", 1.5, "a whole number"),
        ("seed", float("nan"), "a whole number"),
        ("ignore_eos", 0, "true or false"),
        ("ignore_eos", "true", "true or false"),
        ("stop_token_ids", 5, "a list of token ids"),
        ("stop_token_ids", "5", "a list of token ids"),
        ("stop_token_ids", [1000], "allowed are 0 to 999"),
        ("stop_token_ids", [-1], "allowed are 0 to 999"),
        ("stop_token_ids", [2**62], "allowed are 0 to 999"),
        ("stop_token_ids", [1.5], "a whole number"),
        ("stop_token_ids", [True], "a number"),
        ("stop_token_ids", [[]], "a number"),
        ("stop_token_ids", [None], "a number"),
        ("stop_token_ids", [0] * 1025, "at most 1024 are allowed"),
        ("min_p", -0.1, "allowed are 0 to 1"),
        ("min_p", 1.1, "allowed are 0 to 1"),
        ("repetition_penalty", 0, "allowed are 0.01 to 100"),
        ("repetition_penalty", -1, "allowed are 0.01 to 100"),
        ("repetition_penalty", 1e10, "allowed are 0.01 to 100"),
        ("frequency_penalty", 2.1, "allowed are -2 to 2"),
        ("presence_penalty", -2.1, "allowed are -2 to 2"),
        ("presence_penalty", True, "a number"),
        ("logit_bias", [], "an object of token ids and numbers"),
        ("logit_bias", {"1000": 1}, "allowed are 0 to 999"),
        ("logit_bias", {"x": 1}, "must be a number"),
        ("logit_bias", {"5": 101}, "allowed are -100 to 100"),
        ("logit_bias", {"5": None}, "must be a number"),
        ("logit_bias", {str(n): 0 for n in range(1025)}, "at most 1024 are allowed"),
        ("allowed_token_ids", [], "at least one token must be allowed"),
        ("allowed_token_ids", [1000], "allowed are 0 to 999"),
        ("bad_token_ids", [-1], "allowed are 0 to 999"),
        ("bad_words", [""], "strings of 1 to 1024 characters"),
        ("bad_words", 5, "a string or a list"),
        ("min_tokens", -1, "allowed are 0 to 512"),
        ("min_tokens", 257, "at most max_tokens = 256"),
        ("stop", "", "strings of 1 to 1024 characters"),
        ("stop", [""], "strings of 1 to 1024 characters"),
        ("stop", ["a", 5], "strings of 1 to 1024 characters"),
        ("stop", ["x" * 1025], "strings of 1 to 1024 characters"),
        ("stop", [str(n) for n in range(65)], "a string or a list of at most 64"),
        ("stop", {"a": 1}, "a string or a list"),
        ("stop", "\ud83d", "no text"),
        ("include_stop_str_in_output", 1, "true or false"),
        ("skip_special_tokens", "no", "true or false"),
        ("stop_length", 0, "allowed are 1 to 512"),
        ("timeout_ms", 0, "finite numbers from 1 up"),
        ("timeout_ms", "soon", "a number"),
        ("timeout_ms", float("inf"), "finite numbers from 1 up"),
        ("cache_salt", "", "a string of 1 to 256 characters"),
        ("cache_salt", "x" * 257, "a string of 1 to 256 characters"),
        ("cache_salt", 5, "a string of 1 to 256 characters"),
        ("return_token_ids", 1, "true or false"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_value_out_of_range_is_refused_by_the_fields_name(name: str, value: Any, allowed: str) -> None:
    """STP-07, SAM-02, SAM-05, SAM-10, SAM-13, SAM-15: and the next good request is read as ever."""
    text = refusal(**{name: value})
    assert re.match(rf"{name}\b.* (is|has) ", text)
    assert allowed in text
    assert len(text) < 200
    assert parse(max_tokens=3, temperature=0, seed=0).sampling == SamplingParams(3, 0.0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{", "sampling_parameters is not valid JSON"),
        (b"nonsense", "sampling_parameters is not valid JSON"),
        (b"\xff\xfe\xfd", "sampling_parameters is not valid JSON"),
        (b"[" * 100_000, "sampling_parameters is not valid JSON"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "sampling_parameters is not valid JSON"),
        (b'{"seed": 1, "seed": 2}', "the key 'seed' stands twice"),
        (b'{"stop_token_ids": [{"a": 1, "a": 1}]}', "the key 'a' stands twice"),
        (b"[1, 2]", "sampling_parameters is [1, 2]; it must be a JSON object"),
        (b"5", "sampling_parameters is 5; it must be a JSON object"),
        (b"null", "sampling_parameters is None; it must be a JSON object"),
        (b'"{}"', "sampling_parameters is '{}'; it must be a JSON object"),
        (b'{"temperature": NaN}', "temperature is nan"),
        (b'{"temperature": -Infinity}', "temperature is -inf"),
        (b'{"temprature": 1}', "unknown field 'temprature'; did you mean temperature?"),
        (b'{"\\ud83d": 1}', "unknown field '\\ud83d'"),
        (b'{"": 1}', "unknown field ''; known are allowed_token_ids, bad_token_ids"),
        (b'{"' + b"x" * 1000 + b'": 1}', "unknown field 'xxx"),
        (
            b'{"seed": "' + b"1" * (1 << 20) + b'"}',
            "sampling_parameters has 1048588 bytes; at most 1048576 are allowed",
        ),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_json_that_is_none_is_refused(text: bytes, reason: str) -> None:
    """SAM-12: broken, a list, an unknown or a repeated key, NaN, a megabyte."""
    message = refusal(text)
    assert reason in message
    assert len(message) < 200 + len(", ".join(_READERS)), "what was sent is echoed"
    message.encode()


def test_a_repeated_key_among_many_is_found_at_once() -> None:
    """Looking for it must not take the time of all pairs of keys: meanwhile nobody is served."""
    pairs = [f'"{number}": 0' for number in range(70_000)] + ['"69999": 1']
    assert "the key '69999' stands twice" in refusal("{" + ", ".join(pairs) + "}")


@pytest.mark.parametrize("name", ["best_of", "echo", "guided_decoding"])
def test_fields_of_a_later_version_are_refused_by_name(name: str) -> None:
    for value in (1, 0, False, "", []):
        assert refusal(**{name: value}) == f"{name} is not supported by this version"


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_scores_are_asked_for_by_a_number_of_alternatives(name: str) -> None:
    """CHK-03, CHK-05: 0 asks for the tokens' own alone; OpenAI's pair of fields is the gateway's."""
    assert getattr(parse(**{name: 0}).sampling, name) == 0
    assert getattr(parse(**{name: 20}).sampling, name) == 20
    assert getattr(parse(**{name: None}).sampling, name) is None
    for value in (-1, 21, VOCAB_SIZE + 1):
        assert refusal(**{name: value}) == f"{name} is {value}; allowed are 0 to 20"
    assert refusal(**{name: True}) == f"{name} is True; it must be a number"
    assert refusal(**{name: 2.5}) == f"{name} is 2.5; it must be a whole number"
    assert refusal(top_logprobs=2) == "unknown field 'top_logprobs'; did you mean logprobs?"


def test_the_number_of_choices_has_bounds() -> None:
    assert (parse().sampling.n, parse(n=None).sampling.n, parse(n="3").sampling.n) == (1, 1, 3)
    for value in (0, -1, 129):
        assert refusal(n=value) == f"n is {value}; allowed are 1 to 128"


def test_priority_and_tenant_and_their_ranges() -> None:
    fields = parse(priority=-3, tenant="gold")
    assert (fields.priority, fields.tenant) == (-3, "gold")
    assert (parse().priority, parse().tenant) == (0, "")
    assert refusal(priority=1001) == "priority is 1001; allowed are -1000 to 1000"
    assert refusal(priority=0.5) == "priority is 0.5; it must be a whole number"
    assert refusal(tenant="") == "tenant is ''; it must be a string of 1 to 256 characters"
    assert refusal(tenant=7).startswith("tenant is 7")


def test_a_salt_is_a_text_or_there_is_none() -> None:
    """PFX-08: null is none; an empty one is refused, since it could mean both, and so is what is no text."""
    assert parse(cache_salt="a").cache_salt == "a"
    assert parse('{"cache_salt": null}').cache_salt == parse().cache_salt == ""
    for value in ("", 5, 0, False, ["a"], {"a": 1}, "x" * 257):
        assert refusal(cache_salt=value).endswith("it must be a string of 1 to 256 characters")


# --- request parameters


def test_request_parameters_are_a_fallback_for_the_same_names() -> None:
    fields = parse('{"max_tokens": 7}', parameters={"max_tokens": 9, "temperature": "0.5", "seed": 3})
    assert (fields.sampling.max_tokens, fields.sampling.temperature, fields.sampling.seed) == (7, 0.5, 3)


def test_a_request_parameter_that_is_unknown_is_refused() -> None:
    """VAL-11: refused by name, wherever it came."""
    assert refusal(parameters={"runtime_top_k": 5}).startswith("unknown field 'runtime_top_k'")


def test_the_readme_names_every_field_that_is_read_and_no_other() -> None:
    """VAL-11: a prompt may also stand in the JSON, and is read before the fields are."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    table = text.partition("| key | default | meaning |")[2].partition("\n\n")[0]
    named = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted([*_READERS, "messages", "prompt_token_ids"])


# --- token ids


def test_token_ids_inside_the_vocabulary_pass() -> None:
    check_token_ids("input_ids", [0, 999], 1000)


@pytest.mark.parametrize("bad", [-1, 1000, 2**31 - 1, -(2**31)])
def test_token_ids_outside_the_vocabulary_are_refused(bad: int) -> None:
    """VAL-01: both bounds; the embedding never sees them."""
    with pytest.raises(InvalidRequest) as error:
        check_token_ids("input_ids", [5, bad, 1001], 1000)
    assert str(error.value) == f"input_ids has {bad}; token ids are 0 to 999"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(
    [
        "max_tokens",
        "temperature",
        "top_k",
        "top_p",
        "seed",
        "ignore_eos",
        "stop_token_ids",
        "stop_length",
        "stop",
        "logit_bias",
        "min_tokens",
        "bad_words",
        "allowed_token_ids",
        "cache_salt",
        "return_token_ids",
    ]
)


@given(st.dictionaries(names | st.text(), json_values, max_size=4))
def test_any_json_object_is_read_or_refused(values: dict[str, Any]) -> None:
    """Nothing else comes out, and what is read is within its range."""
    try:
        sampling = parse(json.dumps(values)).sampling
    except InvalidRequest:
        return
    assert 1 <= sampling.max_tokens <= ROOM
    assert 0.0 <= sampling.temperature < float("inf")
    assert 0 <= sampling.top_k <= 1000
    assert 0.0 <= sampling.top_p <= 1.0
    assert 0 <= sampling.seed < 2**64
    assert all(0 <= token_id < 1000 for token_id in sampling.stop_token_ids)


@pytest.mark.parametrize("value", [5, "5", [1.0], ["1"], [True], [None], {"a": 1}])
def test_a_prompt_of_ids_is_a_list_of_whole_numbers(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt_token_ids is .* it must be a list of token ids"):
        list_of_ids("prompt_token_ids", value)
    assert list_of_ids("prompt_token_ids", [0, 5]) == [0, 5]
