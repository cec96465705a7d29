"""Fields of a request's `sampling_parameters`, checked before anything is sent.

What depends on the model (its context, its vocabulary) is left to the server.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from slipstream_client.errors import SlipstreamError

ROLES = ("system", "user", "assistant")
# Models that take text alone refuse these.
CONTINUOUS_ONLY = frozenset(
    [
        "include_stop_str_in_output",
        "logprobs",
        "messages",
        "n",
        "priority",
        "prompt_logprobs",
        "prompt_token_ids",
        "stop",
        "tenant",
        "timeout_ms",
    ]
)
_MOST_CHARACTERS = 256
_LONGEST_STRING = 1024
_MOST_STRINGS = 64


class BadField(SlipstreamError):
    """A field has a value that is not allowed; the text names both, and what is."""


def check_sampling(values: Mapping[str, Any]) -> None:
    """Raise BadField for the first field that is unknown or has a value out of its range."""
    for name, value in values.items():
        if name not in CHECKS:
            raise BadField(f"unknown field {show(name)}; known are {', '.join(sorted(CHECKS))}")
        CHECKS[name](name, value)


def check_messages(messages: Any) -> None:
    """A chat: objects of exactly a role and a text."""
    if not isinstance(messages, list) or not messages:
        raise BadField(f"messages is {show(messages)}; it must be a list of objects with role and content")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise BadField(f"messages[{number}] is {show(message)}; it must be an object of exactly role and content")
        if message["role"] not in ROLES:
            raise BadField(f"messages[{number}].role is {show(message['role'])}; allowed are {', '.join(ROLES)}")
        check_text(f"messages[{number}].content", message["content"])


def check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise BadField(f"{name} is {show(value)}; it must be a string")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise BadField(f"{name} is {show(value)}; half a surrogate pair is no text")


def check_token_ids(name: str, value: Any) -> None:
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 1 << 31 for item in value):
        raise BadField(f"{name} is {show(value)}; it must be a list of token ids, whole numbers from 0 up")


def show(value: Any, longest: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _whole(least: int, most: float = math.inf) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        whole = _is_number(value) and float(value).is_integer()
        if not whole or not least <= value <= most:
            raise BadField(f"{name} is {show(value)}; allowed are whole numbers {_range(least, most)}")

    return check


def _real(least: float, most: float = math.inf) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if not _is_number(value) or not least <= value <= most:
            raise BadField(f"{name} is {show(value)}; allowed are numbers {_range(least, most)}")

    return check


def _is_number(value: Any) -> bool:
    """A finite number that fits a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _range(least: float, most: float) -> str:
    return f"from {least} up" if math.isinf(most) else f"from {least} to {most}"


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise BadField(f"{name} is {show(value)}; it must be true or false")


def _name(name: str, value: Any) -> None:
    if not isinstance(value, str) or not 1 <= len(value) <= _MOST_CHARACTERS:
        raise BadField(f"{name} is {show(value)}; it must be a string of 1 to {_MOST_CHARACTERS} characters")


def _strings(name: str, value: Any) -> None:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or len(items) > _MOST_STRINGS:
        raise BadField(f"{name} is {show(value)}; it must be a string or a list of at most {_MOST_STRINGS}")
    for item in items:
        check_text(name, item)
        if not 1 <= len(item) <= _LONGEST_STRING:
            raise BadField(f"{name} has {show(item)}; allowed are strings of 1 to {_LONGEST_STRING} characters")


def _some_token_ids(name: str, value: Any) -> None:
    check_token_ids(name, value)
    if not value:
        raise BadField(f"{name} is []; at least one token must be allowed")


def _logit_bias(name: str, value: Any) -> None:
    if not isinstance(value, dict) or not all(token_id.isdecimal() for token_id in value):
        raise BadField(f"{name} is {show(value)}; it must be an object of token ids and numbers")
    for token_id, bias in value.items():
        _real(-100, 100)(f"{name}[{show(token_id)}]", bias)


CHECKS: Mapping[str, Callable[[str, Any], None]] = {
    "max_tokens": _whole(1),
    "temperature": _real(0),
    "top_k": _whole(-1),
    "top_p": _real(0, 1),
    "min_p": _real(0, 1),
    "seed": _whole(0, (1 << 64) - 1),
    "repetition_penalty": _real(0.01, 100),
    "frequency_penalty": _real(-2, 2),
    "presence_penalty": _real(-2, 2),
    "logit_bias": _logit_bias,
    "allowed_token_ids": _some_token_ids,
    "bad_token_ids": check_token_ids,
    "bad_words": _strings,
    "min_tokens": _whole(0),
    "stop": _strings,
    "include_stop_str_in_output": _flag,
    "skip_special_tokens": _flag,
    "ignore_eos": _flag,
    "stop_token_ids": check_token_ids,
    "stop_length": _whole(1),
    "n": _whole(1, 128),
    "logprobs": _whole(0, 20),
    "prompt_logprobs": _whole(0, 20),
    "timeout_ms": _real(1),
    "priority": _whole(-1000, 1000),
    "tenant": _name,
    "cache_salt": _name,
    "return_token_ids": _flag,
}
