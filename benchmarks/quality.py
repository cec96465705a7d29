"""What the storages of weights and of keys and values cost in quality: `python -m benchmarks.quality [--json]`.

Real text, the language reference that comes with CPython (`pydoc_data.topics`), is scored window by window: perplexity,
and at how many places the likeliest token is that of float32 weights with float32 keys and values.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
from typing import Any

from tokenizers import Tokenizer

from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.request import Request, SamplingParams
from slipstream.models.runner import ModelRunner
from slipstream.models.store import resolve

# The first is what the others are held against.
STORAGES = (("fp32", "fp32"), ("fp16", "fp32"), ("fp16", "fp16"), ("int8", "fp32"), ("int8", "fp16"))


def main() -> None:
    """Run the benchmark and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--windows", type=int, default=24, help="how many stretches of text")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    windows = text_windows(arguments.model, arguments.windows, arguments.tokens)
    reference: list[int] = []
    rows = []
    for weights, kv_cache_dtype in STORAGES:
        scores, likeliest = score(arguments.model, weights, kv_cache_dtype, windows)
        reference = reference or likeliest
        rows.append(
            {
                "weights": weights,
                "kv_cache_dtype": kv_cache_dtype,
                "perplexity": math.exp(-sum(scores) / len(scores)),
                "agreement": sum(a == b for a, b in zip(likeliest, reference, strict=True)) / len(reference),
            }
        )
    if arguments.json:
        print(
            json.dumps({"version": 1, "model": arguments.model, "tokens": len(reference), "storages": rows}, indent=1)
        )
        return
    print(f"{arguments.model}, {len(reference)} tokens in {len(windows)} windows")
    print(f"{'weights':>7} {'KV':>5} {'perplexity':>11} {'change':>8} {'same likeliest token':>21}")
    for row in rows:
        change = row["perplexity"] / rows[0]["perplexity"] - 1
        print(
            f"{row['weights']:>7} {row['kv_cache_dtype']:>5} {row['perplexity']:11.4f} {change:+8.3%} "
            f"{row['agreement']:21.2%}"
        )


def text_windows(model: str, count: int, length: int) -> list[list[int]]:
    """Stretches of the text, spread over it, as token ids."""
    text = "\n\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    ids = Tokenizer.from_file(str(resolve(model) / "tokenizer.json")).encode(text).ids
    distance = (len(ids) - length) // max(count - 1, 1)
    return [ids[number * distance :][:length] for number in range(count)]


def score(model: str, weights: str, kv_cache_dtype: str, windows: list[list[int]]) -> tuple[list[float], list[int]]:
    """Log-probability of each token but the first of a window, and the likeliest token in its place."""
    config = EngineConfig(
        "quality", model=model, device="cpu", weights=weights, kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=512
    )
    engine = Engine(config, ModelRunner(config, resolve(model)))
    scores, likeliest = [], []
    for number, window in enumerate(windows):
        sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
        request: Any = Request((b"", number), window, sampling, arrival_time=0.0)
        engine.add(request)
        while engine.requests:
            engine.step()
        scores += [scored.values[0] for scored in request.prompt_logprobs]
        likeliest += [scored.ids[1] for scored in request.prompt_logprobs]
    return scores, likeliest


if __name__ == "__main__":
    main()
