"""`slipstream generate`: one answer from a running server, token by token."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from slipstream_client.client import SlipstreamClient
from slipstream_client.http_client import HttpSlipstreamClient
from slipstream_client.tensors import Chunk, Generation, SamplingOptions

INTERRUPTED = 130


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.", show_default=False)],
    batcher: Annotated[str, typer.Option(help="The model to ask.")] = "continuous",
    chat: Annotated[bool, typer.Option("--chat", help="Send it as a user's turn, by the model's template.")] = False,
    no_stream: Annotated[bool, typer.Option("--no-stream", help="Wait for the whole answer.")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of the answer.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the likeliest tokens of this total share.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-sequence token.")] = False,
    url: Annotated[
        str | None, typer.Option(help="The server.", show_default="127.0.0.1:8001, with --http 127.0.0.1:8000")
    ] = None,
    over_http: Annotated[bool, typer.Option("--http", help="Use the HTTP generate endpoints instead of gRPC.")] = False,
    timeout: Annotated[
        float | None, typer.Option(min=0.1, max=86400, help="Seconds after which the request has failed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as one JSON object.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print the server's figures of this request too.")] = False,
) -> None:
    """Generate text. Ctrl-C cancels the request at the server; over --http `static` and `dynamic` cannot be told."""
    sampling = _sampling(
        messages=[{"role": "user", "content": prompt}] if chat else None,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        ignore_eos=ignore_eos or None,
    )
    text = None if chat else prompt
    try:
        if over_http:
            http_client = HttpSlipstreamClient(url or "127.0.0.1:8000", batcher, timeout_s=timeout)
            answer = _ask(http_client, text, sampling, no_stream, as_json)
        else:
            with SlipstreamClient(url or "127.0.0.1:8001", batcher, timeout_s=timeout) as client:
                answer = _ask(client, text, sampling, no_stream, as_json)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    _show(answer, as_json, stats)


def _sampling(**options: Any) -> SamplingOptions:
    return SamplingOptions(**{key: value for key, value in options.items() if value is not None})  # type: ignore[typeddict-item]


def _ask(
    client: SlipstreamClient | HttpSlipstreamClient,
    prompt: str | None,
    sampling: SamplingOptions,
    whole: bool,
    quiet: bool,
) -> Generation:
    if whole:
        answer = client.generate(prompt, **sampling)
        if not quiet:
            print(answer.text)
        return answer
    stream = client.stream(prompt, **sampling)
    chunks: list[Chunk] = []
    try:
        for chunk in stream:
            chunks.append(chunk)
            if not quiet:
                print(chunk.text, end="", flush=True)
    finally:
        stream.close()
        if chunks and not quiet:
            print()
    return Generation.of_chunks(chunks)


def _show(answer: Generation, as_json: bool, stats: bool) -> None:
    if as_json:
        fields = {
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "num_input_tokens": answer.num_input_tokens,
            "num_output_tokens": answer.num_output_tokens,
        }
        print(json.dumps(fields | {"stats": answer.stats} if stats else fields))
        return
    if not answer.text and answer.finish_reason == "stop":
        hint = "the model's first token ended the answer; --ignore-eos goes on, or give it a text to continue"
        print(f"(empty: {hint})", file=sys.stderr)
    if stats:
        print(json.dumps(answer.stats), file=sys.stderr)
