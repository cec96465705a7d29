"""What a long prompt costs those that are being answered: `python -m benchmarks.long_prompt [--budgets 32,64]`.

Eight streams run and a prompt of 4000 tokens comes. For each token budget of a step: the P99 of the streams'
inter-token latency (ITL) during the prefill relative to their latency before it, and the speed of the prefill relative
to its speed in an engine of its own with the same budget. A small budget is good for the first and bad for the second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np

from benchmarks.prompts import prompt_ids
from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.request import Request, SamplingParams
from slipstream.models.runner import ModelRunner
from slipstream.models.store import resolve

BAR_LATENCY, BAR_SPEED = 2.0, 0.6
_STREAMS, _STREAM_PROMPT, _STEADY_STEPS = 8, 64, 32
_LONG = (b"", _STREAMS)  # the long prompt's key


def main() -> None:
    """Run the benchmark and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--budgets", default="32,64,128,256", help="comma-separated tokens of a step")
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    config = EngineConfig(name="benchmark", model=arguments.model, device="cpu", max_num_seqs=_STREAMS + 1)
    runner = ModelRunner(config, resolve(config.model))
    results = []
    for budget in map(int, arguments.budgets.split(",")):
        runner.token_budget = budget
        results.append(_measure(config, runner, arguments.prompt_tokens))
    if arguments.json:
        document = {"version": 1, "model": config.model, "prompt_tokens": arguments.prompt_tokens, "budgets": results}
        print(json.dumps(document, indent=1))
        return
    print(
        f"{'budget':>6} {'steady ITL ms':>13} {'P99 ITL ms':>10} {'ratio':>6} {'bar':>4}   "
        f"{'prefill tok/s':>13} {'alone':>6} {'ratio':>6} {'bar':>4}"
    )
    for r in results:
        print(
            f"{r['budget']:6d} {r['steady_itl_ms']:13.1f} {r['p99_itl_ms']:10.1f} {r['itl_ratio']:6.2f} "
            f"{BAR_LATENCY:4.1f}   {r['prefill_tokens_per_s']:13.1f} {r['alone_tokens_per_s']:6.1f} "
            f"{r['speed_ratio']:6.2f} {BAR_SPEED:4.1f}"
        )


def _measure(config: EngineConfig, runner: ModelRunner, prompt_tokens: int) -> dict[str, Any]:
    """Both ratios at the runner's token budget."""
    alone = sum(_prefill(Engine(config, runner), prompt_tokens))
    engine = Engine(config, runner)
    # Long enough not to end before the last chunk, of which each has at least one token.
    sampling = SamplingParams(max_tokens=_STEADY_STEPS + prompt_tokens, temperature=0.0, ignore_eos=True)
    for index in range(_STREAMS):
        engine.add(Request((b"", index), prompt_ids(index, _STREAM_PROMPT), sampling, arrival_time=0.0))
    while any(request.num_output_tokens == 0 for request in engine.requests.values()):
        engine.step()
    steady = statistics.median(_timed_step(engine) for _ in range(_STEADY_STEPS))
    during = _prefill(engine, prompt_tokens)
    p99 = float(np.percentile(during, 99))
    return {
        "budget": runner.token_budget,
        "steps": len(during),
        "steady_itl_ms": steady * 1e3,
        "p99_itl_ms": p99 * 1e3,
        "itl_ratio": p99 / steady,
        "prefill_tokens_per_s": prompt_tokens / sum(during),
        "alone_tokens_per_s": prompt_tokens / alone,
        "speed_ratio": alone / sum(during),
    }


def _prefill(engine: Engine, prompt_tokens: int) -> list[float]:
    """Seconds of each step from a long prompt's arrival to its first token; whoever streams gets a token in each."""
    streams = [request for key, request in engine.requests.items() if key != _LONG]
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    engine.add(Request(_LONG, prompt_ids(_STREAMS, prompt_tokens), sampling, arrival_time=0.0))
    taken = []
    while _LONG in engine.requests:
        before = [request.num_output_tokens for request in streams]
        taken.append(_timed_step(engine))
        assert [request.num_output_tokens for request in streams] == [count + 1 for count in before]
    return taken


def _timed_step(engine: Engine) -> float:
    start = time.perf_counter()
    engine.step()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
