"""How long a comparison will take: its steps played through with a step-time model instead of a language model."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream_client.load.workload import WorkloadRequest

# A step of r rows with the demo model on two cores, server and clients beside it; a warm-up then corrects both by one
# factor.
STEP_S = 0.022
ROW_S = 0.0034

LOCK_STEP = ("static", "dynamic")
_SEATS = 16
_SLOWER = {"transformers": 3.0}  # than the native executor
_PREFILL_ROWS = 64  # most prompt rows in one step


def run_seconds(model: str, executor: str, requests: Sequence[WorkloadRequest], concurrency: int) -> float:
    """Estimate one run of a closed loop at `concurrency`."""
    slower = _SLOWER.get(executor, 1.0)
    return slower * _native_seconds(model, list(map(_lengths, requests)), min(concurrency, _SEATS))


def _native_seconds(model: str, lengths: Sequence[tuple[int, int]], seats: int) -> float:
    if model in LOCK_STEP:
        batches = (lengths[start : start + seats] for start in range(0, len(lengths), seats))
        return sum(_lock_step_seconds(batch) for batch in batches)
    return _step_by_step_seconds(lengths, seats)


def _lengths(request: WorkloadRequest) -> tuple[int, int]:
    """Tokens in and out: of a prompt that nobody has counted its words, of an answer without an end its limit."""
    return request.input_tokens or len(request.text.split()), request.stop_length or request.max_tokens


def _lock_step_seconds(batch: Sequence[tuple[int, int]]) -> float:
    """Every row is padded to the longest prompt and computed until the longest answer is done."""
    prompt_rows = len(batch) * max(prompt for prompt, _ in batch)
    steps = max(answer for _, answer in batch) - 1
    return _step_seconds(prompt_rows) + steps * _step_seconds(len(batch))


def _step_by_step_seconds(requests: Sequence[tuple[int, int]], seats: int) -> float:
    """Requests join and leave between steps."""
    waiting = list(reversed(requests))
    prompts: list[list[int]] = []  # prompt tokens not yet computed, and output tokens still to come, of each sequence
    seconds = 0.0
    while waiting or prompts:
        while waiting and len(prompts) < seats:
            prompts.append([*waiting.pop()])
        rows, budget = 0, _PREFILL_ROWS
        for sequence in prompts:
            if sequence[0]:
                chunk = min(sequence[0], budget)
                budget -= chunk
                sequence[0] -= chunk
                rows += chunk
                sequence[1] -= not sequence[0] and chunk > 0
            else:
                sequence[1] -= 1
                rows += 1
        prompts = [sequence for sequence in prompts if sequence[1]]
        seconds += _step_seconds(rows)
    return seconds


def _step_seconds(rows: int) -> float:
    return STEP_S + ROW_S * rows


def readable(seconds: float) -> str:
    """A duration as people say it."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
