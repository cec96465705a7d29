"""The model's own chat template: messages in, the text that it was trained to answer out."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipstream.errors import InvalidRequest

ROLES = ("system", "user", "assistant")
_MOST_MESSAGES = 1024
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """Renders messages as transformers does: sandboxed Jinja with the same settings, functions and variables."""

    def __init__(self, folder: Path) -> None:
        config = _read_json(folder / "tokenizer_config.json")
        source = _source(folder, config)
        tokens = {name: config.get(name) for name in _SPECIAL_TOKENS}
        # Some configurations hold a token as an object with its text and its flags.
        self._tokens = {
            name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items() if token
        }
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
        self._template: jinja2.Template | None = None
        self._obstacle = "the model has no chat template; send text_input"
        try:
            self._template = environment.from_string(source) if source else None
        except jinja2.TemplateError as error:
            self._obstacle = f"the model's chat template cannot be read: {error}"

    def render(self, messages: Any) -> str:
        """The prompt for an answer to the last message.

        Raises:
            InvalidRequest: no list of messages, or one that the template refuses; or the model has no template.
        """
        _check(messages)
        if self._template is None:
            raise InvalidRequest(f"messages: {self._obstacle}")
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._tokens)
        except Exception as error:  # a template is a program, and not ours
            raise InvalidRequest(f"messages: the model's chat template says: {error}") from None


def _check(messages: Any) -> None:
    if not isinstance(messages, list) or not 1 <= len(messages) <= _MOST_MESSAGES:
        raise InvalidRequest(f"messages must be a list of 1 to {_MOST_MESSAGES} objects with role and content")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise InvalidRequest(f"messages[{number}] must be an object with exactly role and content")
        if message["role"] not in ROLES:
            raise InvalidRequest(f"messages[{number}].role is {message['role']!r}; allowed are {', '.join(ROLES)}")
        if not isinstance(message["content"], str):
            raise InvalidRequest(f"messages[{number}].content must be a string")


def _source(folder: Path, config: dict[str, Any]) -> str | None:
    """The template's text: a file of its own, else in the tokenizer's configuration, where it may be one of several."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        return next((each["template"] for each in template if each["name"] == "default"), None)
    return template


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)
