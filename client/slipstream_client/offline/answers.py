"""A line of the output: an answer or a failure, in the form of the request's line."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from slipstream_client.offline.lines import BatchRequest
from slipstream_client.tensors import Generation, Logprobs, RequestFailed

_OPENAI_ID = "batch_req_"


def answer_line(request: BatchRequest, outcome: Generation | RequestFailed) -> dict[str, Any]:
    """What is written for a request; it begins with `id`, and bears the request's digest."""
    if request.form != "own":
        return _openai_line(request, outcome)
    line: dict[str, Any] = {"id": request.id}
    if isinstance(outcome, RequestFailed):
        line["error"] = {"code": outcome.code, "message": outcome.text.strip()}
    else:
        choices = [outcome, *outcome.others]
        line |= _own_choice(outcome) | {
            "num_input_tokens": outcome.num_input_tokens,
            "num_output_tokens": sum(choice.num_output_tokens for choice in choices),
        }
        if outcome.prompt_logprobs is not None:
            line["prompt_logprobs"] = outcome.prompt_logprobs
        if outcome.others:
            line["choices"] = [
                {"index": index, **_own_choice(choice), "num_output_tokens": choice.num_output_tokens}
                for index, choice in enumerate(choices)
            ]
    return line | {"request": request.digest}


def read_answer(line: dict[str, Any]) -> tuple[str, str, str | None]:
    """Id and digest of the request that a line of the output answers, and the code of its failure.

    Raises:
        KeyError, TypeError, AttributeError: it is no line of a batch's output.
    """
    error = line.get("error")
    code = None if error is None else str(error["code"])
    if "custom_id" in line:
        if not line["id"].startswith(_OPENAI_ID):
            raise KeyError("id")
        return str(line["custom_id"]), line["id"].removeprefix(_OPENAI_ID), code
    if error is None and "text" not in line:
        raise KeyError("text")
    return str(line["id"]), str(line["request"]), code


def _own_choice(choice: Generation) -> dict[str, Any]:
    optional = {"logprobs": choice.logprobs, "output_ids": choice.output_ids}
    return {
        "text": choice.text,
        "finish_reason": choice.finish_reason,
        **{name: value for name, value in optional.items() if value is not None},
    }


def _openai_line(request: BatchRequest, outcome: Generation | RequestFailed) -> dict[str, Any]:
    line: dict[str, Any] = {"id": f"{_OPENAI_ID}{request.digest}", "custom_id": request.id}
    if isinstance(outcome, RequestFailed):
        return line | {"response": None, "error": {"code": outcome.code, "message": outcome.text.strip()}}
    chat, likeliest = request.form == "chat", request.sampling.get("logprobs", 0)
    choices = [outcome, *outcome.others]
    num_input = outcome.num_input_tokens or 0
    num_output = sum(choice.num_output_tokens for choice in choices)
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request.digest}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [
            {"index": index, **(_chat_choice(choice, likeliest) if chat else _completion_choice(choice))}
            for index, choice in enumerate(choices)
        ],
        "usage": {
            "prompt_tokens": num_input,
            "completion_tokens": num_output,
            "total_tokens": num_input + num_output,
        },
    }
    return line | {"response": {"status_code": 200, "request_id": request.id, "body": body}, "error": None}


def _chat_choice(choice: Generation, likeliest: int) -> dict[str, Any]:
    scored = None
    if choice.logprobs is not None:
        scored = {"content": [_chat_token(scores, likeliest) for scores in choice.logprobs]}
    message = {"role": "assistant", "content": choice.text}
    return {"message": message, "logprobs": scored, "finish_reason": choice.finish_reason}


def _chat_token(scores: Logprobs, likeliest: int) -> dict[str, Any]:
    """The token itself stands first; among its `top_logprobs` it is only where it is one of the likeliest."""

    def entry(token: dict[str, Any]) -> dict[str, Any]:
        return {"token": token["decoded_token"], "logprob": token["logprob"], "bytes": token["bytes"]}

    own, *_ = tokens = list(scores.values())
    top = sorted((token for token in tokens if token["rank"] <= likeliest), key=lambda token: token["rank"])
    return entry(own) | {"top_logprobs": [entry(token) for token in top]}


def _completion_choice(choice: Generation) -> dict[str, Any]:
    scored = None if choice.logprobs is None else _completion_logprobs(choice.logprobs)
    return {"text": choice.text, "logprobs": scored, "finish_reason": choice.finish_reason}


def _completion_logprobs(logprobs: Sequence[Logprobs]) -> dict[str, Any]:
    firsts = [next(iter(likeliest.values())) for likeliest in logprobs]
    texts = [token["decoded_token"] for token in firsts]
    return {
        "tokens": texts,
        "token_logprobs": [token["logprob"] for token in firsts],
        "top_logprobs": [
            {token["decoded_token"]: token["logprob"] for token in likeliest.values()} for likeliest in logprobs
        ],
        "text_offset": [sum(map(len, texts[:position])) for position in range(len(texts))],
    }
