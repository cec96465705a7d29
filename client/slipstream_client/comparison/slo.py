"""Service level objectives: limits on latencies, and how many requests of a run kept all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from statistics import NormalDist
from typing import Any

from slipstream_client.comparison.request_figures import e2e_intended_ms, succeeded, tpot_ms, ttft_intended_ms
from slipstream_client.errors import SlipstreamError
from slipstream_client.load.records import RequestRecord

_LIMITS = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2e"}  # spelled as in vLLM's --goodput, and as a field of Slo


@dataclass(frozen=True)
class Slo:
    """Limits in milliseconds; None: no limit on that.

    TTFT and E2E count from the intended time. Where a batcher does not stream, the user sees the first token when the
    answer is complete: TTFT is then E2E, and TPOT 0. So is the TPOT of a single token.
    """

    name: str
    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def describe(self) -> dict[str, float | None]:
        """As in results.json."""
        return {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e}

    def kept_by(self, record: RequestRecord) -> bool:
        """The request was answered within every limit."""
        if not succeeded(record):
            return False
        e2e = e2e_intended_ms(record)
        ttft = ttft_intended_ms(record)
        figures = ((e2e if ttft is None else ttft, self.ttft), (tpot_ms(record) or 0.0, self.tpot), (e2e, self.e2e))
        return all(limit is None or value <= limit for value, limit in figures)


# The limits of MLPerf Inference for LLM servers: llama2-70b (server), llama3.1-8b (interactive).
PRESETS = {slo.name: slo for slo in (Slo("chat", ttft=2000, tpot=200), Slo("interactive", ttft=500, tpot=30))}


def parse_slo(text: str) -> Slo:
    """A preset by its name, or limits in milliseconds such as `ttft:200 tpot:50 e2el:3000`, which are then its name.

    Raises SlipstreamError for anything else.
    """
    if text in PRESETS:
        return PRESETS[text]
    limits: dict[str, float] = {}
    for part in text.split():
        key, colon, value = part.partition(":")
        if key not in _LIMITS or not colon:
            allowed = f"{', '.join(PRESETS)}, or limits in ms such as ttft:200 tpot:50 e2el:3000"
            raise SlipstreamError(f"slo: {part!r} is neither a preset nor a limit; allowed are {allowed}")
        if _LIMITS[key] in limits:
            raise SlipstreamError(f"slo: {key} is given twice in {text!r}")
        limits[_LIMITS[key]] = _milliseconds(key, value)
    if not limits:
        raise SlipstreamError("slo: no limit is given, such as ttft:200")
    return Slo(" ".join(text.split()), **limits)


def slo_figures(records: Sequence[RequestRecord], slo: Slo, duration_s: float) -> dict[str, Any]:
    """Attainment: good requests of all whose turn came, with its Wilson interval; goodput: good requests per second."""
    good, sent = sum(slo.kept_by(record) for record in records), len(records)
    low, high = wilson_interval(good, sent)
    return {
        "good": good,
        "sent": sent,
        "attainment": good / sent if sent else None,
        "low": low,
        "high": high,
        "goodput_per_s": good / duration_s if duration_s else 0.0,
    }


def wilson_interval(good: int, total: int, level: float = 0.95) -> tuple[float, float]:
    """Score interval of a share (Wilson 1927); of nothing at all, from 0 to 1.

    It takes requests for independent. Those of one run share a queue, so that the real uncertainty is larger.
    """
    if not total:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + level / 2)
    share, spread = good / total, z * z / total
    centre = (share + spread / 2) / (1 + spread)
    half = sqrt(share * (1 - share) * spread + spread * spread / 4) / (1 + spread)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def _milliseconds(key: str, value: str) -> float:
    try:
        limit = float(value)
    except ValueError:
        limit = 0.0
    if not (isfinite(limit) and limit > 0):
        raise SlipstreamError(f"slo: {key} is {value!r}; allowed is a number of milliseconds above 0")
    return limit
