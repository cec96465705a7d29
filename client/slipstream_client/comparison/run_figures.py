"""The figures of one run, computed from its measured records; failures never improve one.

Latencies are per request and over successful requests, as `request_figures.py` defines them. Throughput is the tokens
of successful requests over the whole window, from the first sending to the last end of any measured request. What was
sent to warm up or to cool down counts in no figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from slipstream_client.comparison.request_figures import (
    carrying,
    e2e_intended_ms,
    inter_chunk_ms,
    inter_token_ms,
    queue_ms,
    succeeded,
    tpot_ms,
    ttft_intended_ms,
    ttft_ms,
)
from slipstream_client.comparison.slo import Slo, slo_figures
from slipstream_client.comparison.steady_state import steady_state
from slipstream_client.load.records import RequestRecord


def summarise(values: Iterable[float]) -> dict[str, float] | None:
    """Mean and percentiles (linear interpolation), or None for no values."""
    collected = np.fromiter(values, dtype=float)
    if not collected.size:
        return None
    p50, p90, p99 = np.percentile(collected, [50, 90, 99])
    return {"mean": float(collected.mean()), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def measured(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """Without those that warmed up or cooled down."""
    return [record for record in records if record.phase == "measured"]


def window_s(records: Sequence[RequestRecord]) -> float:
    """From the first sending to the last end of any request, failed ones included."""
    sent = [record.sent for record in records if record.sent is not None]
    ended = [record.last for record in records if record.last is not None]
    return max(max(ended) - min(sent), 0.0) if sent and ended else 0.0


def run_figures(records: Sequence[RequestRecord], slos: Sequence[Slo] = ()) -> dict[str, Any]:
    """What an entry of "runs" in results.json says of the requests, from all records of one run.

    "failures" counts every measured request without a full answer; "refusals" (UNAVAILABLE after the last retry),
    "cancelled" and "empty" (an answer without a token) are parts of it.
    """
    counted = measured(records)
    good = [record for record in counted if succeeded(record)]
    duration_s = window_s(counted)
    streamed = [record for record in good if record.first is not None]

    def summary(figure: Callable[[RequestRecord], float | None]) -> dict[str, float] | None:
        return summarise(value for record in good if (value := figure(record)) is not None)

    def per_second(amount: float) -> float:
        return amount / duration_s if duration_s else 0.0

    def failed_with(code: str) -> int:
        return sum(record.error_code == code for record in counted if not succeeded(record))

    return {
        "requests": len(counted),
        "failures": len(counted) - len(good),
        "refusals": failed_with("UNAVAILABLE"),
        "cancelled": failed_with("CANCELLED"),
        "empty": failed_with("EMPTY"),
        "retries": sum(record.retries for record in counted),
        "duration_s": duration_s,
        "output_tokens_per_s": per_second(sum(record.output_tokens for record in good)),
        "input_tokens_per_s": None if (tokens := _input_tokens(good)) is None else per_second(tokens),
        "requests_per_s": per_second(len(good)),
        "steady_state": steady_state(records),
        "ttft_ms": summary(ttft_ms),
        "itl_ms": summarise(gap for record in streamed for gap in inter_token_ms(record)),
        "icl_ms": summarise(gap for record in streamed for gap in inter_chunk_ms(record)),
        "tokens_per_chunk": _tokens_per_chunk(streamed),
        "tpot_ms": summary(tpot_ms),
        "e2e_ms": summary(lambda record: record.e2e_ms),
        "ttft_intended_ms": summary(ttft_intended_ms),
        "e2e_intended_ms": summary(e2e_intended_ms),
        "queue_ms": summary(queue_ms),
        "slo": {slo.name: slo_figures(counted, slo, duration_s) for slo in slos},
    }


def _input_tokens(records: Sequence[RequestRecord]) -> int | None:
    """None where the server did not count those of every request."""
    counts = [record.input_tokens for record in records if record.input_tokens is not None]
    return sum(counts) if len(counts) == len(records) else None


def _tokens_per_chunk(records: Sequence[RequestRecord]) -> float | None:
    counts = [tokens for record in records for _, tokens in carrying(record)]
    return sum(counts) / len(counts) if counts else None
