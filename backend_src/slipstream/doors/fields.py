"""The fields of a request: which exist, what they may be, and what their absence means."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.engine.request import SamplingParams
from slipstream.errors import InvalidRequest

DEFAULT_MAX_TOKENS = 256
_MOST_JSON_BYTES = 1 << 20
_LONGEST_SALT = 256

# Known to users of other servers, and part of this contract, but not computed by this version.
_NOT_SUPPORTED = frozenset(
    [
        "best_of",
        "bad_words",
        "allowed_token_ids",
        "cumulative_logprob",
        "echo",
        "frequency_penalty",
        "guided_decoding",
        "include_stop_str_in_output",
        "logit_bias",
        "logprobs",
        "lora_name",
        "messages",
        "min_p",
        "min_tokens",
        "n",
        "presence_penalty",
        "priority",
        "prompt_logprobs",
        "prompt_token_ids",
        "repetition_penalty",
        "return_cumulative_logprob",
        "return_logprobs",
        "stop",
        "structured_outputs",
        "tenant",
        "timeout_ms",
        "truncate_prompt_tokens",
    ]
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and the engine allow, and the fields that they take and have no use for."""

    max_model_len: int
    vocab_size: int
    ignored: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RequestFields:
    """One request's parameters: how to sample, and what to send back."""

    sampling: SamplingParams
    return_token_ids: bool
    cache_salt: str
    ignored: tuple[str, ...]


def parse_fields(
    sampling_json: bytes | None, parameters: Mapping[str, Any], num_prompt_tokens: int, limits: Limits
) -> RequestFields:
    """Validate a request's parameters.

    Args:
        sampling_json: the `sampling_parameters` tensor, a JSON object; empty or None is an empty object.
        parameters: scalar request parameters, a fallback for the same names.
        num_prompt_tokens: the prompt's length.

    Raises:
        InvalidRequest: names the field, the value and what is allowed.
    """
    values = {**parameters, **_parse_object(sampling_json)}
    given = {name: value for name, value in values.items() if value is not None}
    for name in values:
        if name in _NOT_SUPPORTED and name in given:
            raise InvalidRequest(f"{name} is not supported by this version")
        if name not in _READERS and name not in _NOT_SUPPORTED:
            raise InvalidRequest(f"unknown field {_show(name)}; known are {', '.join(sorted(_READERS))}")
    read = {name: _READERS[name](name, value, limits) for name, value in given.items()}
    return_token_ids = read.pop("return_token_ids", False)
    cache_salt = read.pop("cache_salt", "")
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
    if "seed" not in read:
        read["seed"] = secrets.randbits(64)
    ignored = tuple(sorted(limits.ignored.intersection(given)))
    return RequestFields(SamplingParams(max_tokens=max_tokens, **read), return_token_ids, cache_salt, ignored)


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
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {_show(repeated)} stands twice")
    return values


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


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


def _salt(name: str, value: Any) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= _LONGEST_SALT:
        raise InvalidRequest(f"{name} is {_show(value)}; it must be a string of 1 to {_LONGEST_SALT} characters")
    return value


def _stop_token_ids(name: str, value: Any, limits: Limits) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{name} is {_show(value)}; it must be a list of token ids")
    return tuple(_whole(name, item, 0, limits.vocab_size - 1) for item in value)


_READERS: dict[str, Callable[[str, Any, Limits], Any]] = {
    "max_tokens": lambda name, value, limits: _whole(name, value, 1, limits.max_model_len),
    "temperature": lambda name, value, limits: _real(name, value, 0.0, math.inf),
    "top_k": lambda name, value, limits: max(0, _whole(name, value, -1, limits.vocab_size)),
    "top_p": lambda name, value, limits: _real(name, value, 0.0, 1.0),
    "seed": lambda name, value, limits: _whole(name, value, 0, (1 << 64) - 1),
    "ignore_eos": lambda name, value, limits: _flag(name, value),
    "stop_token_ids": _stop_token_ids,
    "stop_length": lambda name, value, limits: _whole(name, value, 1, limits.max_model_len),
    "cache_salt": lambda name, value, limits: _salt(name, value),
    "return_token_ids": lambda name, value, limits: _flag(name, value),
}
