"""What in tritonserver's log explains that it did not start, as one line."""

from __future__ import annotations

import re
from pathlib import Path

_TAIL_BYTES = 256 * 1024
# `E0101 12:00:00.000000 42 model_lifecycle.cc:642] "failed to load 'x' version 1: Internal: ValueError: …\n\nAt:…"`
_MODEL_FAILED = re.compile(r"failed to load '(?P<model>[^']+)' version \d+: (?P<reason>.+?)(?:\\n|\"?$)", re.MULTILINE)
_POLL_FAILED = re.compile(r"\"((?:Poll failed for|failed to poll) .+?)\"?$", re.MULTILINE)
_PARSE_FAILED = re.compile(r"Error parsing text-format inference\.ModelConfig: (.+)$", re.MULTILINE)
_FAILURE = re.compile(r"^(?:error|failed to|E\d{4} [\d:.]+ \d+ \S+\])[: ]*(.+)$", re.MULTILINE | re.IGNORECASE)
# Said on every machine without a GPU, and no reason for anything.
_HARMLESS = ("CudaDriverHelper has not been initialized", "Failed to initialize NVML", "DCGM")


def failure_reason(log: Path, offset: int = 0) -> str | None:
    """The cause of a failed start in the part of `log` after `offset` bytes; None if nothing in it looks like one."""
    text = _read(log, offset)
    failed: dict[str, list[str]] = {}
    for match in _MODEL_FAILED.finditer(text):
        models = failed.setdefault(_without_codes(match["reason"]), [])
        if match["model"] not in models:
            models.append(match["model"])
    if failed:
        return "; ".join(f"{', '.join(sorted(models))}: {reason}" for reason, models in failed.items())
    polled = _POLL_FAILED.findall(text)
    if polled:
        return "; ".join(dict.fromkeys([*polled, *_PARSE_FAILED.findall(text)]))
    others = [line for line in _FAILURE.findall(text) if not any(word in line for word in _HARMLESS)]
    return others[-1].strip(' "') if others else None


def _read(log: Path, offset: int) -> str:
    with log.open("rb") as file:
        end = file.seek(0, 2)
        file.seek(max(offset, end - _TAIL_BYTES))
        return file.read().decode(errors="replace")


def _without_codes(reason: str) -> str:
    """Drop Triton's own prefixes, which say only that a model failed: `Internal: ValueError: …`."""
    return re.sub(r"^(?:Internal|Unavailable|Invalid argument|InvalidArg): ", "", reason)
