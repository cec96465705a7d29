"""Speed of the engine alone against its limits: `python -m benchmarks.engine [--json]`.

Decode, prefill and a mixed load on the CPU. In turn with each step, the matmuls of that step are run alone on the same
packed weights: the ratio of the two medians says how much of a step is matmul. What is reached in GB/s and GFLOP/s is
held against a copy and a large matmul of torch in the same run. An absolute time on a shared machine says little.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit

from benchmarks.prompts import prompt_ids
from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.request import Request, SamplingParams
from slipstream.models.cpu_llama import CpuLlama
from slipstream.models.kernels.cpu_matmul import matmul
from slipstream.models.kernels.cpu_step import PARTS
from slipstream.models.runner import ModelRunner
from slipstream.models.store import resolve
from slipstream_client.load.workload import make_workload

_STEPS = 24  # of decode at each point
_SEQUENCES = (1, 4, 8, 16, 32, 64)
_CONTEXTS = (128, 512)
_PROMPTS = (64, 256, 1024)


def main() -> None:
    """Run the benchmark and print its tables, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", default="fp16", choices=("fp16", "fp32", "int8"))
    parser.add_argument("--kv-cache-dtype", default="fp16", choices=("fp32", "fp16"))
    parser.add_argument("--sequences", default=",".join(map(str, _SEQUENCES)), help="numbers of sequences to decode")
    parser.add_argument("--contexts", default=",".join(map(str, _CONTEXTS)), help="tokens before the decoded ones")
    parser.add_argument("--prompts", default=",".join(map(str, _PROMPTS)), help="tokens of the prompts to prefill")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sequences, contexts, prompts = (
        [int(number) for number in listed.split(",") if number]
        for listed in (arguments.sequences, arguments.contexts, arguments.prompts)
    )
    bench = EngineBenchmark(arguments.model, arguments.weights, arguments.kv_cache_dtype)
    results = {
        "version": 2,
        "model": arguments.model,
        "weights": arguments.weights,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "machine": {"copy_gb_per_s": copy_speed(), "torch_matmul_gflop_per_s": matmul_speed()},
        "decode": [bench.decode(count, context) for context in contexts for count in sequences],
        "prefill": [bench.prefill(length) for length in prompts],
        "mixed": bench.mixed(),
    }
    print(json.dumps(results, indent=1) if arguments.json else _tables(results))


class EngineBenchmark:
    """One loaded model, measured in several ways; times are medians, and their ratios are of the same run."""

    def __init__(self, model: str, weights: str = "fp16", kv_cache_dtype: str = "fp16") -> None:
        # A budget that takes all prompts of a point in few steps, so that the sequences decode side by side.
        self._config = EngineConfig(
            name="benchmark",
            model=model,
            device="cpu",
            weights=weights,
            kv_cache_dtype=kv_cache_dtype,
            max_num_seqs=64,
            max_num_batched_tokens=4096,
            kv_cache_bytes=3 << 30,
            prefix_cache=False,
        )
        self._runner = ModelRunner(self._config, resolve(model))
        assert isinstance(self._runner.model, CpuLlama)
        self._model = self._runner.model
        self._matmuls = Matmuls(self._model)

    def decode(self, count: int, context: int) -> dict[str, Any]:
        """Steps of `count` sequences around that context, each in turn with its matmuls alone."""
        engine = Engine(self._config, self._runner)
        for index in range(count):
            self._add(engine, index, context - _STEPS // 2, _STEPS + 2)
        while any(request.num_output_tokens == 0 for request in engine.requests.values()):
            engine.step()
        steps: list[float] = []
        matmuls: list[float] = []
        parts: list[dict[str, float]] = []
        while sum(request.num_output_tokens <= _STEPS for request in engine.requests.values()) == count:
            self._step(engine, steps, parts)
            matmuls.append(_timed(lambda: self._matmuls.run(count, count)))
        records = engine.records.last(len(steps))
        engine.abort(list(engine.requests))
        step, alone = statistics.median(steps), statistics.median(matmuls)
        kv_bytes = count * context * self._model.kv_bytes_per_token()
        return {
            "sequences": count,
            "context": context,
            "tokens_per_s": count / step,
            "step_ms": step * 1e3,
            "matmul_ms": alone * 1e3,
            "matmul_ratio": alone / step,
            "gflop_per_s": self._matmuls.flop(count, count) / step / 1e9,
            "gb_per_s": (self._matmuls.num_bytes + kv_bytes) / step / 1e9,
            "parts_ms": {part: statistics.median(each[part] for each in parts) * 1e3 for part in parts[0]},
            "sampling_ms": statistics.median(r["run_s"] for r in records) * 1e3
            - statistics.median(sum(each.values()) for each in parts) * 1e3,
            "scheduler_ms": statistics.median(r["schedule_s"] + r["update_s"] for r in records) * 1e3,
        }

    def prefill(self, length: int) -> dict[str, Any]:
        """Prompts of that length, each computed in one step of its own, in turn with its matmuls alone."""
        steps: list[float] = []
        matmuls: list[float] = []
        parts: list[dict[str, float]] = []
        for _ in range(5):
            engine = Engine(self._config, self._runner)
            self._add(engine, 0, length, 1)
            self._step(engine, steps, parts)
            matmuls.append(_timed(lambda: self._matmuls.run(length, 1)))
        step, alone = statistics.median(steps), statistics.median(matmuls)
        return {
            "tokens": length,
            "tokens_per_s": length / step,
            "step_ms": step * 1e3,
            "matmul_ms": alone * 1e3,
            "matmul_ratio": alone / step,
            "gflop_per_s": self._matmuls.flop(length, 1) / step / 1e9,
            "parts_ms": {part: statistics.median(each[part] for each in parts) * 1e3 for part in parts[0]},
        }

    def mixed(self, num_requests: int = 96, seats: int = 32) -> dict[str, Any]:
        """The workload `mixed` in a closed loop: a request arrives whenever one has ended; prompts come in chunks."""
        config = dataclasses.replace(self._config, max_num_seqs=seats, max_num_batched_tokens=64)
        self._runner.token_budget, budget = 64, self._runner.token_budget
        engine, waiting = Engine(config, self._runner), list(make_workload("mixed", num_requests, seed=0).requests)
        before, start, tokens = self._model.part_seconds(), time.perf_counter(), 0
        while waiting or engine.requests:
            while waiting and len(engine.requests) < seats:
                request = waiting.pop()
                self._add(engine, len(waiting), request.input_tokens or 1, request.stop_length)
            tokens += sum(1 for request in engine.step() if request.num_output_tokens)
        seconds = time.perf_counter() - start
        self._runner.token_budget = budget
        return {
            "requests": num_requests,
            "sequences": seats,
            "output_tokens_per_s": tokens / seconds,
            "parts_share": {
                part: (after - before[part]) / seconds for part, after in self._model.part_seconds().items()
            },
        }

    def _step(self, engine: Engine, steps: list[float], parts: list[dict[str, float]]) -> None:
        """Compute a step, and note its seconds as a whole and by part."""
        before = self._model.part_seconds()
        steps.append(_timed(engine.step))
        parts.append({part: seconds - before[part] for part, seconds in self._model.part_seconds().items()})

    @staticmethod
    def _add(engine: Engine, index: int, prompt_tokens: int, max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        engine.add(Request((b"", index), prompt_ids(index, prompt_tokens), sampling, arrival_time=0.0))


class Matmuls:
    """The matmuls of a step and nothing else, by the same threads on the same packed weights."""

    def __init__(self, model: CpuLlama) -> None:
        self._model = model
        w = model.weights
        self._both = np.empty((0, 0), np.float32)  # [rows, 2 * intermediate]
        self._layers, self._head = (w.qkv, w.output, w.gate_up, w.down), w.lm_head
        self.num_bytes = sum(matrix.panels.nbytes for matrix in (*self._layers, self._head))

    def flop(self, num_rows: int, num_logits: int) -> float:
        """Floating-point operations for so many rows, of which some get logits."""
        layers = sum(matrix.panels.size for matrix in self._layers)
        return 2.0 * (num_rows * layers + num_logits * self._head.panels.size)

    def run(self, num_rows: int, num_logits: int) -> None:
        """Multiply rows of any values."""
        model = self._model
        work = model.workspace(max(num_rows, num_logits))
        if len(self._both) < num_rows:
            self._both = np.empty((num_rows, 2 * work.gated.shape[1]), np.float32)
        logits = model.logit_arrays(num_logits)
        arguments = (num_rows, num_logits, work, self._both, self._layers, self._head, logits)
        model.run_threads(_matmuls_alone, num_rows, *arguments)


@njit(nogil=True)
def _matmuls_alone(thread, team, num_rows, num_logits, work, both, layers, head, logits):
    qkv, output, gate_up, down = layers
    for layer in range(qkv.panels.shape[0]):
        matmul(team, work.normed, num_rows, qkv, layer, work.quantised, work.qkv)
        matmul(team, work.attended, num_rows, output, layer, work.quantised, work.delta)
        matmul(team, work.normed, num_rows, gate_up, layer, work.quantised, both)
        matmul(team, work.gated, num_rows, down, layer, work.quantised, work.delta)
    matmul(team, work.normed, num_logits, head, 0, work.quantised, logits.values)


def copy_speed() -> float:
    """GB/s that torch's copy of 256 MB reads and writes together."""
    source = torch.ones(64 << 20)
    target = torch.empty_like(source)
    return 2 * source.nbytes / statistics.median(_timed(lambda: target.copy_(source)) for _ in range(7)) / 1e9


def matmul_speed() -> float:
    """GFLOP/s of torch's float32 matmul of two matrices of 1536 x 1536."""
    a, b = torch.randn(1536, 1536), torch.randn(1536, 1536)
    return 2 * 1536**3 / statistics.median(_timed(lambda: a @ b) for _ in range(7)) / 1e9


def _timed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _tables(results: dict[str, Any]) -> str:
    parts = [part for part in PARTS if part != "idle"]
    machine = results["machine"]
    lines = [
        f"{results['model']}, {results['weights']} weights, {results['kv_cache_dtype']} KV",
        f"a copy reaches {machine['copy_gb_per_s']:.1f} GB/s, torch's float32 matmul "
        f"{machine['torch_matmul_gflop_per_s']:.0f} GFLOP/s",
        "",
        f"{'context':>7} {'seqs':>5} {'tokens/s':>9} {'step ms':>8} {'matmul':>7} {'ratio':>6} {'GFLOP/s':>8} "
        f"{'GB/s':>6}" + "".join(f" {part:>9}" for part in parts) + f" {'sampling':>9} {'scheduler':>9}",
    ]
    for r in results["decode"]:
        lines.append(
            f"{r['context']:7d} {r['sequences']:5d} {r['tokens_per_s']:9.1f} {r['step_ms']:8.1f} {r['matmul_ms']:7.1f} "
            f"{r['matmul_ratio']:6.2f} {r['gflop_per_s']:8.0f} {r['gb_per_s']:6.1f}"
            + "".join(f" {r['parts_ms'][part]:9.2f}" for part in parts)
            + f" {r['sampling_ms']:9.2f} {r['scheduler_ms']:9.2f}"
        )
    lines += ["", f"{'prompt':>7} {'tokens/s':>9} {'step ms':>8} {'matmul':>7} {'ratio':>6} {'GFLOP/s':>8}"]
    lines[-1] += "".join(f" {part:>9}" for part in parts)
    for r in results["prefill"]:
        lines.append(
            f"{r['tokens']:7d} {r['tokens_per_s']:9.1f} {r['step_ms']:8.1f} {r['matmul_ms']:7.1f} "
            f"{r['matmul_ratio']:6.2f} {r['gflop_per_s']:8.0f}"
            + "".join(f" {r['parts_ms'][part]:9.2f}" for part in parts)
        )
    mixed = results["mixed"]
    shares = ", ".join(f"{part} {share:.0%}" for part, share in mixed["parts_share"].items())
    lines += [
        "",
        f"mixed: {mixed['requests']} requests, {mixed['sequences']} at a time: "
        f"{mixed['output_tokens_per_s']:.1f} output tokens/s; of the time: {shares}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
