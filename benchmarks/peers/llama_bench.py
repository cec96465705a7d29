"""What llama.cpp's own `llama-batched-bench` finds: prefill and decode without a server and without sampling."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence

from benchmarks.peers.child import run_program
from benchmarks.peers.llama_cpp import LlamaCpp

_CELLS = 256  # contexts of sequences are rounded up to so many tokens
_TIMES = 3  # each prompt is prefilled; the median counts


def decode(
    llama: LlamaCpp, format: str, threads: int, sequences: Sequence[int], prompt: int, output: int
) -> dict[int, float]:
    """Tokens/s by number of sequences, over `output` steps after prompts of `prompt` tokens."""
    return speeds(_bench(llama, format, threads, [prompt], output, sequences), by="pl", speed="speed_tg")


def prefill(llama: LlamaCpp, format: str, threads: int, prompts: Sequence[int]) -> dict[int, float]:
    """Tokens/s by prompt tokens, of one sequence."""
    repeated = [prompt for prompt in prompts for _ in range(_TIMES)]
    return speeds(_bench(llama, format, threads, repeated, 1, [1]), by="pp", speed="speed_pp")


def speeds(lines: str, *, by: str, speed: str) -> dict[int, float]:
    """Of the program's JSON lines: the median `speed` for each value of the field `by`."""
    found: dict[int, list[float]] = {}
    for line in lines.splitlines():
        if line.startswith("{"):
            point = json.loads(line)
            found.setdefault(point[by], []).append(point[speed])
    return {value: statistics.median(each) for value, each in found.items()}


def _bench(
    llama: LlamaCpp, format: str, threads: int, prompts: Sequence[int], output: int, sequences: Sequence[int]
) -> str:
    context = -(-(max(prompts) + output) // _CELLS) * _CELLS  # of each sequence
    command = [
        *(str(llama.bench), "-m", str(llama.gguf(format)), "-t", str(threads), "-c", str(max(sequences) * context)),
        *("-npp", ",".join(map(str, prompts)), "-ntg", str(output), "-npl", ",".join(map(str, sequences))),
        *("--output-format", "jsonl"),
    ]
    return run_program(command)
