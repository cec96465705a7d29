"""Workloads from files: what a line gives is what is offered, and a bad line is named."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from slipstream_client.comparison.estimate import run_seconds
from slipstream_client.errors import SlipstreamError
from slipstream_client.load.workload import make_workload


def offered(path: Path, count: int, **options: Any) -> list[tuple[Any, ...]]:
    """Text, lengths and limit of every request."""
    requests = make_workload(str(path), count, **options).requests
    return [(request.text, request.input_tokens, request.stop_length, request.max_tokens) for request in requests]


def json_lines(folder: Path, *lines: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def sharegpt(folder: Path, *conversations: Any) -> Path:
    path = folder / "sharegpt.json"
    path.write_text(json.dumps(conversations))
    return path


def conversation(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": speaker, "value": value} for speaker, value in turns]}


def test_lengths_of_a_file_get_words_of_their_own(tmp_path: Path) -> None:
    path = json_lines(tmp_path, {"input_tokens": 64, "output_tokens": 5}, "", {"input_tokens": 3, "output_tokens": 70})
    drawn = make_workload("equal", 1, seed=4).requests[0].text
    (first, second) = make_workload(str(path), 2, seed=4).requests
    assert (first.text, first.input_tokens, first.stop_length) == (drawn, 64, 5)
    assert (len(second.text.split(" ")), second.input_tokens, second.stop_length) == (3, 3, 70)
    # The longest answer of the file, also where that is not among the requests.
    assert make_workload(str(path), 1).requests[0].max_tokens == 70
    assert first.sampling()["ignore_eos"] is True


def test_lengths_of_a_file_are_scaled_and_cut(tmp_path: Path) -> None:
    path = json_lines(
        tmp_path, {"input_tokens": 100, "output_tokens": 40}, {"input_tokens": 10, "output_tokens": 8, "max_tokens": 30}
    )
    workload = make_workload(str(path), 2, scale=0.5, max_input=20, max_output=18)
    assert [request.input_tokens for request in workload.requests] == [20, 5]
    assert [request.stop_length for request in workload.requests] == [18, 4]
    assert [request.max_tokens for request in workload.requests] == [18, 15]
    described = workload.describe()
    assert described["cut"] == {"input": 1, "output": 1}
    assert described["max_tokens"]["min"] == 15


def test_prompts_of_a_file_go_as_they_are(tmp_path: Path) -> None:
    path = json_lines(
        tmp_path,
        {"prompt": "Why is the sky blue?", "output_tokens": 500},
        {"prompt": "Süß\n", "max_tokens": 20, "model": "ignored"},
        {"prompt": "one two", "input_tokens": 2},
    )
    assert offered(path, 3) == [
        ("Why is the sky blue?", None, 500, 500),
        ("Süß\n", None, 0, 20),
        ("one two", 2, 0, 500),
    ]
    assert offered(path, 3, max_output=100)[0] == ("Why is the sky blue?", None, 100, 100)
    free = make_workload(str(path), 3).requests[1]
    assert free.sampling() == {"temperature": 0, "max_tokens": 20, "return_token_ids": True}


def test_answers_without_an_end_have_the_usual_limit(tmp_path: Path) -> None:
    path = json_lines(tmp_path, {"prompt": "a", "output_tokens": 5}, {"prompt": "b"})
    assert offered(path, 2) == [("a", None, 5, 384), ("b", None, 0, 384)]


def test_description_of_a_file_says_what_it_cannot_know(tmp_path: Path) -> None:
    path = json_lines(tmp_path, {"prompt": "a"}, {"input_tokens": 4, "output_tokens": 6}, {"prompt": "b"})
    described = make_workload(str(path), 3).describe()
    assert described["name"] == "prompts.jsonl"
    assert described["file"] == {"name": "prompts.jsonl", "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    assert described["source"] == "a user's file (prompts: 2, lengths: 1)"
    assert (described["uncounted"], described["unbounded"]) == (2, 2)
    assert described["input_tokens"] == {"mean": 4.0, "min": 4, "p50": 4.0, "p90": 4.0, "max": 4, "total": 4, "cv": 0.0}
    only_prompts = make_workload(str(json_lines(tmp_path, {"prompt": "a"})), 1).describe()
    assert (only_prompts["input_tokens"], only_prompts["output_tokens"]) == (None, None)


def test_lines_with_times_are_offered_in_their_order(tmp_path: Path) -> None:
    times = (30, "2", 2.0, 1.5)
    path = json_lines(tmp_path, *({"prompt": str(at), "timestamp": time} for at, time in enumerate(times)))
    assert [text for text, *_ in offered(path, 4)] == ["3", "1", "2", "0"]


def test_a_file_begins_with_a_mark_or_ends_without_a_newline(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}')
    assert [text for text, *_ in offered(path, 2)] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "prompts.jsonl line 2 is no JSON"),
        ("[" * 100_000, "prompts.jsonl line 2 is no JSON"),
        ("[1]", "prompts.jsonl line 2: the line is [1]; allowed: a JSON object"),
        ('{"prompt": ""}', "prompts.jsonl line 2: prompt is ''; allowed: text that is not empty"),
        ('{"prompt": 5}', "line 2: prompt is 5; allowed: text"),
        ('{"prompt": "\\ud800"}', "line 2: prompt is '\\ud800'; allowed: text"),
        ('{"messages": []}', "line 2: neither prompt nor both of input_tokens and output_tokens"),
        ('{"input_tokens": 5}', "line 2: neither prompt nor both"),
        (
            '{"input_tokens": 0, "output_tokens": 1}',
            "prompts.jsonl line 2: input_tokens is 0; allowed: whole numbers from 1 to 1048576",
        ),
        ('{"input_tokens": 5, "output_tokens": 1.5}', "line 2: output_tokens is 1.5; allowed: whole numbers"),
        ('{"prompt": "a", "output_tokens": true}', "line 2: output_tokens is True; allowed: whole numbers"),
        ('{"prompt": "a", "max_tokens": "9"}', "line 2: max_tokens is '9'; allowed: whole numbers"),
        (
            '{"prompt": "a", "output_tokens": 9, "max_tokens": 8}',
            "line 2: output_tokens is 9; allowed: at most the line's max_tokens, 8",
        ),
        ('{"prompt": "a", "timestamp": 1}', "line 2: a timestamp in all lines or in none"),
        ('{"prompt": "a", "arrival": "noon"}', "line 2: arrival is 'noon'; allowed: seconds from 0, or a date"),
        ('{"prompt": "a", "timestamp": -1}', "line 2: timestamp is -1; allowed: seconds from 0"),
        (json.dumps({"prompt": "a", "output_tokens": "9" * 80}), f"output_tokens is '{'9' * 59}...; allowed"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = json_lines(tmp_path, {"prompt": "good"}, line)
    with pytest.raises(SlipstreamError, match=re.escape(message)):
        make_workload(str(path), 1)


def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"cannot read .*none\.jsonl: No such file"):
        make_workload(str(tmp_path / "none.jsonl"), 1)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('{"prompt": "ä"}'.encode("latin-1"))
    with pytest.raises(SlipstreamError, match=r"latin\.jsonl: byte 12 is no UTF-8"):
        make_workload(str(latin), 1)
    path = json_lines(tmp_path, {"prompt": "a"})
    with pytest.raises(SlipstreamError, match=r"prompts\.jsonl has 1 requests where 2 are asked for"):
        make_workload(str(path), 2)
    for options in ({"scale": 0.5}, {"max_input": 5}):
        with pytest.raises(SlipstreamError, match="scale and max_input are for lengths"):
            make_workload(str(path), 1, **options)  # type: ignore[arg-type]


def test_sharegpt_is_the_first_human_turn_and_the_answer_to_it(tmp_path: Path) -> None:
    path = sharegpt(
        tmp_path,
        conversation(("system", "s" * 40), ("human", "p" * 16), ("gpt", "a" * 42), ("human", "q"), ("gpt", "b")),
    )
    # 42 / 4 is 10.5, which rounds to the even one; it is also the longest answer.
    assert offered(path, 1) == [("p" * 16, None, 10, 10)]


def test_sharegpt_is_filtered_as_by_vllm(tmp_path: Path) -> None:
    def pair(prompt_tokens: int, answer_tokens: int) -> dict[str, Any]:
        return conversation(("human", "p" * 4 * prompt_tokens), ("gpt", "a" * 4 * answer_tokens))

    path = sharegpt(
        tmp_path,
        pair(4, 4),
        pair(3, 4),
        pair(4, 3),
        pair(1024, 1024),
        pair(1025, 4),
        pair(1024, 1025),
        conversation(("human", "alone and long enough")),
        conversation(("gpt", "an answer to nothing"), ("human", "the question after it")),
        conversation(),
    )
    assert {(len(text), stop_length) for text, _, stop_length, _ in offered(path, 2)} == {(16, 4), (4096, 1024)}
    described = make_workload(str(path), 2).describe()
    assert described["left_out"] == {"too short": 2, "too long": 2, "no answer": 3}
    assert described["uncounted"] == 2
    with pytest.raises(SlipstreamError, match="has 2 requests where 3"):
        make_workload(str(path), 3)


def test_sharegpt_is_shuffled_by_the_seed_and_begins_with_the_shorter_sequence(tmp_path: Path) -> None:
    path = sharegpt(
        tmp_path, *(conversation(("human", f"question number {at}"), ("gpt", "a" * 20)) for at in range(50))
    )
    everything = offered(path, 50)
    assert offered(path, 20) == everything[:20]
    assert everything != sorted(everything)
    assert sorted(offered(path, 50, seed=1)) == sorted(everything)
    assert offered(path, 50, seed=1) != everything


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "sharegpt.json is no JSON"),
        ("{}", "sharegpt.json: the file is {}; allowed: a list of conversations"),
        ("[5]", "sharegpt.json conversation 1: conversations is None; allowed: a list of turns"),
        ('[{"conversations": 7}]', "sharegpt.json conversation 1: conversations is 7; allowed: a list of turns"),
        ('[{"conversations": ["x"]}]', "conversation 1 turn 1: the turn is 'x'; allowed: a JSON object"),
        ('[{"conversations": [{"from": "human"}]}]', "conversation 1 turn 1: value is None; allowed: text"),
        ('[{"conversations": [{"from": 1, "value": ""}]}]', "conversation 1 turn 1: from is 1; allowed: text"),
    ],
)
def test_a_bad_conversation_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(content)
    with pytest.raises(SlipstreamError, match=re.escape(message)):
        make_workload(str(path), 1)


def test_the_estimate_takes_words_and_limits_for_what_is_unknown(tmp_path: Path) -> None:
    unknown = make_workload(str(json_lines(tmp_path, {"prompt": "one two three", "max_tokens": 7})), 1).requests
    known = make_workload(str(json_lines(tmp_path, {"input_tokens": 3, "output_tokens": 7})), 1).requests
    for batcher in ("static", "continuous"):
        assert run_seconds(batcher, "native", unknown, 1) == run_seconds(batcher, "native", known, 1)
