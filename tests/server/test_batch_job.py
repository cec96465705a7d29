"""`slipstream batch` on the real server: killed in the middle, gone on with, and compared with direct answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers import MODELS, PROMPTS, ask, ask_with, inputs_for, sampling_json
from observing import wait_until, wait_until_at_rest
from slipstream_client import cli
from slipstream_client.server.tritonserver import TritonServer

pytestmark = pytest.mark.server

SLIPSTREAM = [sys.executable, "-c", "from slipstream_client.cli import main; main()"]


def write(path: Path, requests: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def batch(*arguments: str | Path) -> Any:
    return CliRunner().invoke(cli.make_app([]), ["batch", *map(str, arguments)])


def test_killed_and_gone_on_with_it_has_every_answer_once_and_each_is_the_direct_one(
    server: TritonServer, tmp_path: Path
) -> None:
    # No more than 4 of them in flight, so most are not even sent when it is killed.
    requests = [
        {"id": f"{number}-{index}", "prompt": prompt, "max_tokens": 6 + index, "temperature": 0, "ignore_eos": True}
        for number in range(2)
        for index, prompt in enumerate(PROMPTS)
    ]
    source, out = write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    command = [*SLIPSTREAM, "batch", str(source), str(out), "--url", server.grpc_url, "--concurrency", "4"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 3, "three requests are answered", seconds=120)
    process.kill()
    process.wait()
    before = out.read_bytes()
    assert 3 <= before.count(b"\n") < len(requests)
    wait_until_at_rest(server, ["continuous"])  # the server has cancelled what was in flight
    result = batch(source, out, "--url", server.grpc_url)
    assert result.exit_code == 0, result.output
    assert out.read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    answers = {answer["id"]: answer for answer in lines(out)}
    assert sorted(answers) == sorted(request["id"] for request in requests)
    assert len(lines(out)) == len(requests)
    for index, prompt in enumerate(PROMPTS):
        direct = ask(server, "continuous", prompt, max_tokens=6 + index, ignore_eos=True)
        for number in range(2):
            answer = answers[f"{number}-{index}"]
            assert answer["text"] == direct.text
            assert answer["num_input_tokens"] == direct.num_input_tokens
            assert (answer["num_output_tokens"], answer["finish_reason"]) == (6 + index, "length")


@pytest.mark.parametrize("model", MODELS)
def test_every_batcher_gives_the_same_answers(server: TritonServer, tmp_path: Path, model: str) -> None:
    requests = [{"prompt": prompt, "temperature": 0} for prompt in PROMPTS[:3]]
    source, out = write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    result = batch(source, out, "--url", server.grpc_url, "--batcher", model, "--max-tokens", "6")
    assert result.exit_code == 0, result.output
    texts = {answer["id"]: answer["text"] for answer in lines(out)}
    direct = {
        f"line-{n}": ask(server, "continuous", prompt, max_tokens=6).text for n, prompt in enumerate(PROMPTS[:3], 1)
    }
    assert texts == direct


def test_openai_lines_choices_scores_and_a_refusal(server: TritonServer, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    chat = {"messages": messages, "temperature": 0, "max_tokens": 8, "logprobs": True, "top_logprobs": 2}
    requests: list[dict[str, Any]] = [
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {
            "custom_id": "n",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "1, 2,", "n": 2, "max_tokens": 4},
        },
        {"id": "long", "prompt": "x", "max_tokens": 1_000_000},
        {"id": "ids", "input_ids": [1, 2, 3], "max_tokens": 2, "return_token_ids": True},
    ]
    source, out = write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    assert batch(source, out, "--url", server.grpc_url).exit_code == 1
    answers = {answer.get("custom_id", answer["id"]): answer for answer in lines(out)}
    inputs = inputs_for("continuous", "", sampling_json(messages=messages, max_tokens=8))[1:]
    (choice,) = answers["chat"]["response"]["body"]["choices"]
    assert choice["message"]["content"] == ask_with(server, "continuous", inputs).text
    tokens = choice["logprobs"]["content"]
    spelled = b"".join(bytes(token["bytes"]) for token in tokens).decode()
    assert spelled.removesuffix("<|im_end|>") == choice["message"]["content"]
    assert all(token["top_logprobs"][0]["token"] == token["token"] for token in tokens), "greedy takes the likeliest"
    body = answers["n"]["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["completion_tokens"] == 8
    assert answers["long"]["error"]["code"] == "INVALID_ARGUMENT"
    assert "max_tokens is 1000000" in answers["long"]["error"]["message"]
    assert len(answers["ids"]["output_ids"]) == 2


def test_without_an_address_a_server_is_started_and_ended(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", [{"id": "a", "prompt": "The sky is"}]), tmp_path / "out.jsonl"
    command = [*SLIPSTREAM, "batch", str(source), str(out), "--batcher", "static", "--max-tokens", "3"]
    environment = {**os.environ, "SLIPSTREAM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    (answer,) = lines(out)
    assert (answer["id"], answer["num_output_tokens"]) == ("a", 3)
    assert "starting a server with static" in ended.stderr
    assert "static: has left its engine" in (tmp_path / "out.tritonserver.log").read_text(errors="replace")
