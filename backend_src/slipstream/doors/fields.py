"""The fields of a request: which exist, what they may be, and what their absence means."""

from __future__ import annotations

import difflib
import json
import math
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.engine.request import MOST_LOGPROBS, SamplingParams
from slipstream.errors import InvalidRequest

DEFAULT_MAX_TOKENS = 256
_MOST_JSON_BYTES = 1 << 20
_MOST_CHARACTERS = 256
_LONGEST_NAME = 40
_MOST_STRINGS = 64
_MOST_PRIORITY = 1000
_LONGEST_STRING = 1024
_MOST_CHOICES = 128
_MOST_TOKEN_IDS = 1024  # of one list: they are looked at in every step

# Known to users of other servers, and part of this contract, but not computed by this version.
_NOT_SUPPORTED = frozenset(
    [
        "best_of",
        "echo",
        "guided_decoding",
        "lora_name",
        "structured_outputs",
        "truncate_prompt_tokens",
    ]
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and the engine allow; fields that this door takes and has no use for, and those it refuses."""

    max_model_len: int
    vocab_size: int
    ignored: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RequestFields:
    """One request's parameters: how to sample, and what to make of the answer's text.

    `bad_words` are not in `sampling` yet: only a tokenizer knows their ids.
    """

    sampling: SamplingParams
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    cache_salt: str = ""
    timeout_ms: float | None = None
    priority: int = 0
    tenant: str = ""
    ignored: tuple[str, ...] = ()

    def shown(self, token_ids: list[int]) -> list[int]:
        """Of an answer's tokens, or its newest, those that are text: all but one of `stop_token_ids`, which ends it."""
        hidden = token_ids[-1:] and token_ids[-1] in self.sampling.stop_token_ids
        return token_ids[:-1] if hidden and not self.include_stop_str_in_output else token_ids


def read_values(sampling_json: bytes | None, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What a request says, by name.

    Args:
        sampling_json: the `sampling_parameters` tensor, a JSON object; empty or None is an empty object.
        parameters: scalar request parameters, a fallback for the same names.

    Raises:
        InvalidRequest: it is no JSON object.
    """
    return {**parameters, **_parse_object(sampling_json)}


def parse_fields(values: Mapping[str, Any], num_prompt_tokens: int, limits: Limits) -> RequestFields:
    """Validate what a request says, with a prompt of that length.

    Raises:
        InvalidRequest: names the field, the value and what is allowed.
    """
    given = {name: value for name, value in values.items() if value is not None}
    for name in values:
        if name in limits.refused and name in given:
            raise InvalidRequest(f"{name} is not supported by this model; `continuous` and its unary twin have it")
        if name in _NOT_SUPPORTED and name in given:
            raise InvalidRequest(f"{name} is not supported by this version")
        if name not in _READERS and name not in _NOT_SUPPORTED:
            close = difflib.get_close_matches(name[:_LONGEST_NAME], _READERS, 1)
            known = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(_READERS))}"
            raise InvalidRequest(f"unknown field {_show(name, _LONGEST_NAME)}; {known}")
    read = {name: _READERS[name](name, value, limits) for name, value in given.items()}
    others = {name: read.pop(name) for name in (*_OF_TEXT, *_OF_THE_REQUEST) if name in read}
    room = limits.max_model_len - num_prompt_tokens
    if room < 1:
        raise InvalidRequest(
            f"the prompt has {num_prompt_tokens} tokens; with at least one output token at most "
            f"{limits.max_model_len} are allowed"
        )
    max_tokens = read.pop("max_tokens", min(DEFAULT_MAX_TOKENS, room))
    if max_tokens > room:
        raise InvalidRequest(
            f"max_tokens is {max_tokens}; with a prompt of {num_prompt_tokens} tokens at most {room} are allowed "
            f"(context of {limits.max_model_len})"
        )
    if read.get("min_tokens", 0) > max_tokens:
        raise InvalidRequest(f"min_tokens is {read['min_tokens']}; at most max_tokens = {max_tokens} are allowed")
    bad_token_ids = read.pop("bad_token_ids", ())
    if bad_token_ids:
        read["bad_sequences"] = tuple((token_id,) for token_id in bad_token_ids)
    if "seed" not in read:
        read["seed"] = secrets.randbits(64)
    ignored = tuple(sorted(limits.ignored.intersection(given)))
    return RequestFields(SamplingParams(max_tokens=max_tokens, **read), ignored=ignored, **others)


def check_token_ids(field: str, token_ids: list[int], vocab_size: int) -> None:
    """Refuse ids outside the vocabulary.

    Raises:
        InvalidRequest: names the field and the first bad id.
    """
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{field} has {token_id}; token ids are 0 to {vocab_size - 1}")


def _parse_object(text: bytes | None) -> dict[str, Any]:
    if not text:
        return {}
    if len(text) > _MOST_JSON_BYTES:
        raise InvalidRequest(f"sampling_parameters has {len(text)} bytes; at most {_MOST_JSON_BYTES} are allowed")
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"sampling_parameters is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"sampling_parameters is {_show(value)}; it must be a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        ((repeated, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {_show(repeated)} stands twice")
    return values


def _show(value: Any, longest: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _number(name: str, value: Any) -> float | int:
    """A number, or a string that is one; a boolean is none."""
    if isinstance(value, str):
        try:
            value = float(value) if any(c in value for c in ".eEnN") else int(value)
        except ValueError:
            raise InvalidRequest(f"{name} is {_show(value)}; it must be a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} is {_show(value)}; it must be a number")
    return value


def _whole(name: str, value: Any, least: int, most: int) -> int:
    number = _number(name, value)
    if isinstance(number, float) and not number.is_integer():
        raise InvalidRequest(f"{name} is {_show(value)}; it must be a whole number")
    if not least <= number <= most:
        raise InvalidRequest(f"{name} is {_show(value)}; allowed are {least} to {most}")
    return int(number)


def _real(name: str, value: Any, least: float, most: float) -> float:
    try:
        number = float(_number(name, value))
    except OverflowError:  # a whole number of hundreds of digits
        number = math.inf
    if not (math.isfinite(number) and least <= number <= most):
        allowed = f"{least:g} to {most:g}" if math.isfinite(most) else f"finite numbers from {least:g} up"
        raise InvalidRequest(f"{name} is {_show(value)}; allowed are {allowed}")
    return number


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} is {_show(value)}; it must be true or false")
    return value


def list_of_ids(field: str, value: Any) -> list[int]:
    """A prompt of token ids; whether the model has them is checked with every prompt.

    Raises:
        InvalidRequest: it is no list of whole numbers.
    """
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise InvalidRequest(f"{field} is {_show(value)}; it must be a list of token ids")
    return value


def _name(name: str, value: Any) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= _MOST_CHARACTERS:
        raise InvalidRequest(f"{name} is {_show(value)}; it must be a string of 1 to {_MOST_CHARACTERS} characters")
    return value


def _token_ids(name: str, value: Any, limits: Limits) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{name} is {_show(value)}; it must be a list of token ids")
    if len(value) > _MOST_TOKEN_IDS:
        raise InvalidRequest(f"{name} has {len(value)} token ids; at most {_MOST_TOKEN_IDS} are allowed")
    return tuple(_whole(name, item, 0, limits.vocab_size - 1) for item in value)


def _allowed_token_ids(name: str, value: Any, limits: Limits) -> tuple[int, ...]:
    ids = _token_ids(name, value, limits)
    if not ids:
        raise InvalidRequest(f"{name} is []; at least one token must be allowed")
    return ids


def _logit_bias(name: str, value: Any, limits: Limits) -> dict[int, float]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} is {_show(value)}; it must be an object of token ids and numbers")
    if len(value) > _MOST_TOKEN_IDS:
        raise InvalidRequest(f"{name} has {len(value)} token ids; at most {_MOST_TOKEN_IDS} are allowed")
    return {
        _whole(f"{name} key", token_id, 0, limits.vocab_size - 1): _real(f"{name}[{_show(token_id)}]", bias, -100, 100)
        for token_id, bias in value.items()
    }


def _strings(name: str, value: Any) -> tuple[str, ...]:
    """One string, or a list of them; none may be empty."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or len(items) > _MOST_STRINGS:
        raise InvalidRequest(f"{name} is {_show(value)}; it must be a string or a list of at most {_MOST_STRINGS}")
    for item in items:
        if not isinstance(item, str) or not 1 <= len(item) <= _LONGEST_STRING:
            raise InvalidRequest(f"{name} has {_show(item)}; allowed are strings of 1 to {_LONGEST_STRING} characters")
        if any("\ud800" <= character <= "\udfff" for character in item):
            raise InvalidRequest(f"{name} has {_show(item)}; half a surrogate pair is no text")
    return tuple(dict.fromkeys(items))


# Fields that choose no tokens: what to make of the answer's text, and what concerns the request as a whole.
_OF_TEXT = ("bad_words", "stop", "include_stop_str_in_output", "skip_special_tokens")
_OF_THE_REQUEST = ("return_token_ids", "cache_salt", "timeout_ms", "priority", "tenant")
_READERS: dict[str, Callable[[str, Any, Limits], Any]] = {
    "max_tokens": lambda name, value, limits: _whole(name, value, 1, limits.max_model_len),
    "temperature": lambda name, value, limits: _real(name, value, 0.0, math.inf),
    "top_k": lambda name, value, limits: max(0, _whole(name, value, -1, limits.vocab_size)),
    "top_p": lambda name, value, limits: _real(name, value, 0.0, 1.0),
    "min_p": lambda name, value, limits: _real(name, value, 0.0, 1.0),
    "seed": lambda name, value, limits: _whole(name, value, 0, (1 << 64) - 1),
    "ignore_eos": lambda name, value, limits: _flag(name, value),
    "repetition_penalty": lambda name, value, limits: _real(name, value, 0.01, 100.0),
    "frequency_penalty": lambda name, value, limits: _real(name, value, -2.0, 2.0),
    "presence_penalty": lambda name, value, limits: _real(name, value, -2.0, 2.0),
    "logit_bias": _logit_bias,
    "allowed_token_ids": _allowed_token_ids,
    "bad_token_ids": _token_ids,
    "bad_words": lambda name, value, limits: _strings(name, value),
    "min_tokens": lambda name, value, limits: _whole(name, value, 0, limits.max_model_len),
    "stop": lambda name, value, limits: _strings(name, value),
    "include_stop_str_in_output": lambda name, value, limits: _flag(name, value),
    "skip_special_tokens": lambda name, value, limits: _flag(name, value),
    "stop_token_ids": _token_ids,
    "n": lambda name, value, limits: _whole(name, value, 1, _MOST_CHOICES),
    "logprobs": lambda name, value, limits: _whole(name, value, 0, MOST_LOGPROBS),
    "prompt_logprobs": lambda name, value, limits: _whole(name, value, 0, MOST_LOGPROBS),
    "stop_length": lambda name, value, limits: _whole(name, value, 1, limits.max_model_len),
    "timeout_ms": lambda name, value, limits: _real(name, value, 1.0, math.inf),
    "cache_salt": lambda name, value, limits: _name(name, value),
    "priority": lambda name, value, limits: _whole(name, value, -_MOST_PRIORITY, _MOST_PRIORITY),
    "tenant": lambda name, value, limits: _name(name, value),
    "return_token_ids": lambda name, value, limits: _flag(name, value),
}
