"""Workloads from a user's file: JSON lines with prompts or lengths, and ShareGPT's conversations."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream_client.errors import SlipstreamError
from slipstream_client.load.named_workloads import LEAST_MAX_TOKENS
from slipstream_client.load.source import Entry, Source, refused, whole_number
from slipstream_client.load.streams import Stream, generator
from slipstream_client.load.timestamps import TIME_FIELDS, seconds

SUFFIXES = (".jsonl", ".json")

_HUMAN = frozenset({"human", "user"})
_MODEL = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard"})
_CHARACTERS_A_TOKEN = 4
# The bounds of vLLM's benchmarks, in tokens.
_SHORTEST, _LONGEST_PROMPT, _LONGEST_TOGETHER = 4, 1024, 2048


def read_dataset(name: str, count: int, seed: int) -> Source:
    """The first `count` requests of a file.

    Raises:
        SlipstreamError: it cannot be read, something in it is wrong, or it has fewer requests.
    """
    path = Path(name).expanduser()
    content = read_file(path)
    about: dict[str, Any] = {"file": {"name": path.name, "sha256": hashlib.sha256(content).hexdigest()}}
    if path.suffix == ".jsonl":
        source = _json_lines(path.name, decoded(path.name, content), about)
    else:
        source = _sharegpt(path.name, decoded(path.name, content), seed, about)
    if len(source.entries) < count:
        raise SlipstreamError(
            f"{path.name} has {len(source.entries)} requests where {count} are asked for; ask for fewer, as none is "
            "sent twice: a prefix cache would know it"
        )
    return Source(source.entries[:count], source.max_tokens, about)


def read_file(path: Path) -> bytes:
    """The bytes of a user's file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise SlipstreamError(f"cannot read {path}: {error.strerror}") from error


def decoded(name: str, content: bytes) -> str:
    """Its text, without the mark that some editors put before it."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SlipstreamError(f"{name}: byte {error.start} is no UTF-8") from error


def json_objects(name: str, content: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The object of every line that is not empty, after the line's place for messages."""
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{name} line {number}"
        value = _json(place, line)
        if not isinstance(value, dict):
            raise refused(place, "the line", value, "a JSON object")
        yield place, value


def arrival(place: str, line: dict[str, Any]) -> float | None:
    """The line's `timestamp` or `arrival` in seconds."""
    field = next((field for field in TIME_FIELDS if field in line), None)
    return None if field is None else seconds(place, field, line[field])


def _json_lines(name: str, content: str, about: dict[str, Any]) -> Source:
    """Lines with `prompt`, `input_tokens` or both; lengths alone need `output_tokens` too, prompts need not.

    Requests are offered in the order of their `timestamp` or `arrival` where the lines have one, else of the lines.
    """
    entries: list[Entry] = []
    times: list[float | None] = []
    for place, line in json_objects(name, content):
        entries.append(_entry(place, line))
        times.append(arrival(place, line))
        if (times[0] is None) != (times[-1] is None):
            raise SlipstreamError(f"{place}: a timestamp in all lines or in none")
    if None not in times:
        entries = [entries[at] for at in sorted(range(len(times)), key=times.__getitem__)]  # type: ignore[arg-type]
    prompts = sum(entry.prompt is not None for entry in entries)
    about["source"] = f"a user's file (prompts: {prompts}, lengths: {len(entries) - prompts})"
    return Source(tuple(entries), _limit(entries), about)


def _entry(place: str, line: dict[str, Any]) -> Entry:
    prompt = _text(place, "prompt", line["prompt"]) if line.get("prompt") is not None else None
    if prompt == "":
        raise refused(place, "prompt", prompt, "text that is not empty")
    input_tokens, output_tokens, max_tokens = (
        whole_number(place, field, line[field]) if line.get(field) is not None else None
        for field in ("input_tokens", "output_tokens", "max_tokens")
    )
    if prompt is None and (input_tokens is None or output_tokens is None):
        raise SlipstreamError(f"{place}: neither prompt nor both of input_tokens and output_tokens")
    if max_tokens is not None and output_tokens is not None and output_tokens > max_tokens:
        raise refused(place, "output_tokens", output_tokens, f"at most the line's max_tokens, {max_tokens}")
    return Entry(input_tokens, output_tokens, prompt, max_tokens)


def _limit(entries: list[Entry]) -> int:
    """max_tokens of the lines without: the longest answer of the file, and room where an answer ends by itself."""
    lengths = [entry.output_tokens for entry in entries if entry.output_tokens is not None]
    return max([LEAST_MAX_TOKENS, *lengths] if len(lengths) < len(entries) else lengths, default=LEAST_MAX_TOKENS)


def _sharegpt(name: str, content: str, seed: int, about: dict[str, Any]) -> Source:
    """Each conversation's first human turn is a prompt; the answer after it gives the output length.

    Without a tokenizer, a token is taken to be four characters. By that count vLLM's filter is applied: prompt and
    answer have at least 4 tokens, the prompt at most 1024, both together at most 2048. The order is drawn, as the
    parts of one conversation are neighbours in the published file.
    """
    conversations = _json(name, content)
    if not isinstance(conversations, list):
        raise refused(name, "the file", conversations, "a list of conversations (ShareGPT)")
    entries: list[Entry] = []
    left_out: Counter[str] = Counter()
    for number, conversation in enumerate(conversations, start=1):
        pair = _first_pair(f"{name} conversation {number}", conversation)
        if pair is None:
            left_out["no answer"] += 1
            continue
        prompt_tokens, answer_tokens = map(_tokens, pair)
        if min(prompt_tokens, answer_tokens) < _SHORTEST:
            left_out["too short"] += 1
        elif prompt_tokens > _LONGEST_PROMPT or prompt_tokens + answer_tokens > _LONGEST_TOGETHER:
            left_out["too long"] += 1
        else:
            entries.append(Entry(None, answer_tokens, pair[0]))
    order = generator(seed, Stream.ORDER).permutation(len(entries))
    about["source"] = "ShareGPT, first human turn and the answer to it; a token is taken to be 4 characters"
    about["left_out"] = dict(left_out)
    return Source(tuple(entries[at] for at in order), _limit(entries), about)


def _first_pair(place: str, conversation: Any) -> tuple[str, str] | None:
    """The first human turn and the first of a model after it."""
    turns = conversation.get("conversations") if isinstance(conversation, dict) else None
    if not isinstance(turns, list):
        raise refused(place, "conversations", turns, "a list of turns")
    prompt = None
    for number, turn in enumerate(turns, start=1):
        here = f"{place} turn {number}"
        if not isinstance(turn, dict):
            raise refused(here, "the turn", turn, "a JSON object")
        speaker, text = (_text(here, field, turn.get(field)) for field in ("from", "value"))
        if prompt is None and speaker in _HUMAN:
            prompt = text
        elif prompt is not None and speaker in _MODEL:
            return prompt, text
    return None


def _tokens(text: str) -> int:
    return round(len(text) / _CHARACTERS_A_TOKEN)


def _json(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SlipstreamError(f"{place} is no JSON: {error}") from error


def _text(place: str, field: str, value: object) -> str:
    """`value`, which is text that can be sent: JSON can also spell halves of characters."""
    if not isinstance(value, str) or any("\ud800" <= character <= "\udfff" for character in value):
        raise refused(place, field, value, "text")
    return value
