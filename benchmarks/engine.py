"""Decode speed of the engine alone against its limit: `python -m benchmarks.engine [--json]`.

For each number of sequences the engine decodes around context 128, and in turn with each of its steps the matmuls of
that step are run alone on the same packed weights. The ratio of the two medians says how much of a step is matmul; an
absolute time on a shared machine says little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.request import Request, SamplingParams
from slipstream.models.linear import pad_rows
from slipstream.models.runner import ModelRunner
from slipstream.models.store import resolve

# Least ratio of matmul time to step time, by number of sequences.
BARS = {1: 0.57, 8: 0.47, 16: 0.50, 64: 0.54}
_PROMPT_TOKENS, _DECODE_STEPS = 112, 32  # contexts 112 to 144, 128 on average


def main() -> None:
    """Run the benchmark and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--sequences", default="1,8,16,64", help="comma-separated numbers of sequences")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    # All prompts in one step, so that the sequences decode side by side from the first token on.
    config = EngineConfig(
        name="benchmark",
        model=arguments.model,
        device="cpu",
        max_num_seqs=64,
        max_num_batched_tokens=64 * _PROMPT_TOKENS,
    )
    runner = ModelRunner(config, resolve(config.model))
    _decode(config, runner, 1)  # compiles the kernels
    results = [_decode(config, runner, int(count)) for count in arguments.sequences.split(",")]
    if arguments.json:
        print(json.dumps({"version": 1, "model": config.model, "decode": results}, indent=1))
        return
    print(
        f"{'sequences':>9} {'step ms':>8} {'matmul ms':>9} {'ratio':>6} {'bar':>5} {'tokens/s':>9} {'scheduler us':>12}"
    )
    for r in results:
        bar = "" if r["bar"] is None else f"{r['bar']:.2f}"
        print(
            f"{r['sequences']:9d} {r['step_ms']:8.1f} {r['matmul_ms']:9.1f} {r['ratio']:6.2f} {bar:>5} "
            f"{r['tokens_per_s']:9.1f} {r['scheduler_us']:12.0f}"
        )


def _decode(config: EngineConfig, runner: ModelRunner, count: int) -> dict[str, Any]:
    """Median times of a decode step of `count` sequences and of its matmuls alone, taken in turn."""
    engine = Engine(config, runner)
    sampling = SamplingParams(max_tokens=_DECODE_STEPS + 2, temperature=0.0, ignore_eos=True)
    for index in range(count):
        prompt = [(7 * index + 3 * position) % 1000 + 100 for position in range(_PROMPT_TOKENS)]
        engine.add(Request((b"", index), prompt, sampling, arrival_time=0.0))
    while any(request.num_output_tokens == 0 for request in engine.requests.values()):
        engine.step()
    rows = pad_rows(count, "fp16")
    inputs = {features: torch.randn(rows, features) for _, features in runner.model.linears()}
    step_times, matmul_times = [], []
    while sum(request.num_output_tokens <= _DECODE_STEPS for request in engine.requests.values()) == count:
        step_times.append(_timed(engine.step))
        matmul_times.append(_timed(lambda: _matmuls(runner, inputs)))
    records = engine.records.last(len(step_times))
    step, matmul = statistics.median(step_times), statistics.median(matmul_times)
    return {
        "sequences": count,
        "steps": len(step_times),
        "step_ms": step * 1e3,
        "matmul_ms": matmul * 1e3,
        "ratio": matmul / step,
        "bar": BARS.get(count),
        "tokens_per_s": count / step,
        "scheduler_us": statistics.median(r["schedule_s"] + r["update_s"] for r in records) * 1e6,
    }


def _matmuls(runner: ModelRunner, inputs: dict[int, torch.Tensor]) -> None:
    with torch.inference_mode():
        for linear, features in runner.model.linears():
            linear(inputs[features])


def _timed(action: Any) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
