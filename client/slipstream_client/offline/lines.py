"""One line of the input: a request in our own form, or one of OpenAI's batch files."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

from slipstream_client.offline.fields import (
    CHECKS,
    CONTINUOUS_ONLY,
    BadField,
    check_messages,
    check_sampling,
    check_text,
    check_token_ids,
    show,
)

Form = Literal["own", "completion", "chat"]

_PROMPTS = ("prompt", "messages", "input_ids", "prompt_token_ids")
_ENDPOINTS: dict[str, Form] = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}
# Of OpenAI's bodies: what changes no answer here, and what is taken only as it is by default.
_WITHOUT_EFFECT = ("model", "user", "metadata", "store", "service_tier")
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "echo": (False,),
    "best_of": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tools": ([],),
    "modalities": (["text"],),
}


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request; `prompt` or `input_ids` is there, or `messages` in `sampling`.

    `digest` stands for all of it: an answer bears it, so that a changed request is not taken for the answered one.
    """

    id: str
    line: int
    form: Form
    prompt: str | None
    input_ids: list[int] | None
    sampling: dict[str, Any]
    model: str | None = None  # as an OpenAI line names it

    @property
    def digest(self) -> str:
        said = [self.id, self.form, self.prompt, self.input_ids, self.sampling]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def continuous_only(self) -> list[str]:
        """What it asks for that models which take text alone do not have, by the names of its line."""
        return [*(["input_ids"] if self.input_ids is not None else []), *CONTINUOUS_ONLY.intersection(self.sampling)]


def parse_line(text: bytes, line: int, max_tokens: int | None = None) -> BatchRequest:
    """Read and check one line; `max_tokens` is for a request that does not say how many.

    Raises:
        BadField: names the field, the value and what is allowed.
    """
    try:
        values = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadField(f"not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise BadField(f"{show(values)} is no JSON object")
    request = _openai(values, line) if "custom_id" in values or "body" in values else _own(values, line)
    if max_tokens is not None:
        request.sampling.setdefault("max_tokens", max_tokens)
    return request


def _own(values: dict[str, Any], line: int) -> BatchRequest:
    values = _without_nulls(values)
    id_ = _id("id", values.pop("id", f"line-{line}"))
    nested = values.pop("sampling_parameters", {})
    if not isinstance(nested, dict):
        raise BadField(f"sampling_parameters is {show(nested)}; it must be an object")
    nested = _without_nulls(nested)
    twice = nested.keys() & values.keys()
    if twice:
        raise BadField(f"{min(twice)} stands beside sampling_parameters and in it")
    return _request(id_, line, "own", values | nested)


def _openai(values: dict[str, Any], line: int) -> BatchRequest:
    unknown = values.keys() - {"custom_id", "method", "url", "body"}
    if unknown:
        raise BadField(f"unknown field {show(min(unknown))}; known are custom_id, method, url, body")
    if "custom_id" not in values:
        raise BadField("custom_id is missing")
    if values.get("method", "POST") != "POST":
        raise BadField(f"method is {show(values['method'])}; allowed is POST")
    url, body = values.get("url"), values.get("body")
    if not isinstance(url, str) or url not in _ENDPOINTS:
        raise BadField(f"url is {show(url)}; allowed are {', '.join(_ENDPOINTS)}")
    if not isinstance(body, dict):
        raise BadField(f"body is {show(body)}; it must be an object")
    id_, form = _id("custom_id", values["custom_id"]), _ENDPOINTS[url]
    body = _without_nulls(body)
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise BadField(f"model is {show(model)}; it must be a string")
    for name in _WITHOUT_EFFECT:
        body.pop(name, None)
    for name, allowed in _DEFAULTS.items():
        if name in body and body.pop(name) not in allowed:
            raise BadField(f"{name} is {show(values['body'][name])}; allowed is {json.dumps(allowed[0])}")
    body = _chat_body(body) if form == "chat" else _completion_body(body)
    return _request(id_, line, form, body, model)


def _completion_body(body: dict[str, Any]) -> dict[str, Any]:
    _refuse(body, ("messages", "input_ids", "prompt_token_ids"), "prompt")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        if not all(type(item) is int for item in prompt):
            raise BadField(f"prompt is {show(prompt)}; allowed is one string or one list of token ids for each line")
        body["input_ids"] = prompt
        del body["prompt"]
    else:
        body["prompt"] = prompt
    return body


def _chat_body(body: dict[str, Any]) -> dict[str, Any]:
    _refuse(body, ("prompt", "input_ids", "prompt_token_ids"), "messages")
    if "max_completion_tokens" in body:
        body["max_tokens"] = body.pop("max_completion_tokens")  # wins, as at OpenAI
    scored, likeliest = body.pop("logprobs", False), body.pop("top_logprobs", 0)
    if not isinstance(scored, bool):
        raise BadField(f"logprobs is {show(scored)}; it must be true or false")
    CHECKS["logprobs"]("top_logprobs", likeliest)
    if likeliest and not scored:
        raise BadField(f"top_logprobs is {likeliest}; allowed is 0 where logprobs is not true")
    if scored:
        body["logprobs"] = likeliest
    messages = body.get("messages")
    if isinstance(messages, list):
        body["messages"] = [_with_one_text(message) for message in messages]
    return body


def _with_one_text(message: Any) -> Any:
    """A message whose content is a list of text parts, with their text."""
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return message
    if any(set(part) != {"type", "text"} or part["type"] != "text" for part in parts):
        raise BadField(f"content is {show(parts)}; allowed is a string or parts of type text")
    return {**message, "content": "".join(map(str, (part["text"] for part in parts)))}


def _request(id_: str, line: int, form: Form, values: dict[str, Any], model: str | None = None) -> BatchRequest:
    given = [name for name in _PROMPTS if name in values]
    if len(given) != 1:
        raise BadField(f"exactly one of {', '.join(_PROMPTS)} is needed, not {' and '.join(given) or 'none'}")
    (name,) = given
    source = values[name]
    sampling = {name: value for name, value in values.items() if name not in _PROMPTS}
    check_sampling(sampling)
    prompt: str | None = None
    input_ids: list[int] | None = None
    if name == "prompt":
        check_text(name, source)
        prompt = source
    elif name == "messages":
        check_messages(source)
        sampling["messages"] = source
    else:
        check_token_ids(name, source)
        input_ids = source
    if not source:
        raise BadField(f"{name} is {show(source)}; it must not be empty")
    return BatchRequest(id_, line, form, prompt, input_ids, sampling, model)


def _id(name: str, value: Any) -> str:
    """A string or a whole number; kept as a string."""
    if type(value) is int:
        value = str(value)
    if not isinstance(value, str) or not 1 <= len(value) <= 256 or not value.isprintable():
        raise BadField(f"{name} is {show(value)}; it must be a string of 1 to 256 printable characters")
    return value


def _refuse(body: dict[str, Any], names: tuple[str, ...], instead: str) -> None:
    for name in names:
        if name in body:
            raise BadField(f"{name} is no field of this url; it takes {instead}")


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    """As the server sees it: a field that is null is not there."""
    return {name: value for name, value in values.items() if value is not None}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {show(next(name for name in names if names.count(name) > 1))} stands twice")
    return values


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")
