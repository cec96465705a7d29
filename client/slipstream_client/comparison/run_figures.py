"""The figures of one run, computed from its records and the server's counters; failures never improve one.

Definitions, all per request and over successful requests:

* TTFT: from sending to the first chunk that carries a token.
* E2E: from sending to the last response.
* ITL: the gap between two chunks, divided by the tokens of the later one and counted once for each of them.
* ICL: the same gap, raw, once for each chunk.
* TPOT: from the first to the last chunk with tokens, divided by (output tokens - 1); none for a single token.
* queue: E2E less the time for which the engine had the request in service.
* Throughput: tokens of successful requests over the whole window, from the first sending to the last response.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from slipstream_client.comparison.engine_metrics import EngineFigures
from slipstream_client.comparison.resources import ProcessFigures
from slipstream_client.load.generator import LoadOptions
from slipstream_client.load.records import RequestRecord


def summarise(values: Iterable[float]) -> dict[str, float] | None:
    """Mean and percentiles (linear interpolation), or None for no values."""
    collected = np.fromiter(values, dtype=float)
    if not collected.size:
        return None
    p50, p90, p99 = np.percentile(collected, [50, 90, 99])
    return {"mean": float(collected.mean()), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def ttft_ms(record: RequestRecord) -> float | None:
    """Time to first token; None where the batcher does not stream."""
    if record.first is None or record.sent is None:
        return None
    return (record.first - record.sent) * 1000


def inter_token_ms(record: RequestRecord) -> list[float]:
    """One gap for each output token after those of the first chunk."""
    tokens = [tokens for _, tokens in _carrying(record)[1:]]
    return [gap / count for gap, count in zip(inter_chunk_ms(record), tokens, strict=True) for _ in range(count)]


def inter_chunk_ms(record: RequestRecord) -> list[float]:
    """The raw gaps between chunks that carry tokens."""
    times = [at for at, _ in _carrying(record)]
    return [(at - before) * 1000 for before, at in pairwise(times)]


def tpot_ms(record: RequestRecord) -> float | None:
    """Time per output token after the first; None where that is undefined."""
    if record.first is None or record.output_tokens < 2:
        return None
    last, _ = _carrying(record)[-1]
    return (last - record.first) * 1000 / (record.output_tokens - 1)


def window_s(records: Sequence[RequestRecord]) -> float:
    """From the first sending to the last end of any request, failed ones included."""
    sent = [record.sent for record in records if record.sent is not None]
    ended = [record.last for record in records if record.last is not None]
    return max(ended) - min(sent) if sent and ended else 0.0


def run_figures(
    options: LoadOptions,
    records: Sequence[RequestRecord],
    engine: EngineFigures | None = None,
    processes: ProcessFigures | None = None,
) -> dict[str, Any]:
    """One entry of "runs" in results.json, from the records of one run and what was seen of the server during it."""
    good = [record for record in records if record.error is None]
    duration_s = window_s(records)
    tokens = sum(record.output_tokens for record in good)
    streamed = [record for record in good if record.first is not None]
    return {
        "batcher": options.batcher,
        "executor": options.executor,
        "concurrency": options.concurrency,
        "requests": len(records),
        "failures": len(records) - len(good),
        "duration_s": duration_s,
        "output_tokens_per_s": tokens / duration_s if duration_s else 0.0,
        "requests_per_s": len(good) / duration_s if duration_s else 0.0,
        "ttft_ms": summarise(value for record in streamed if (value := ttft_ms(record)) is not None),
        "itl_ms": summarise(gap for record in streamed for gap in inter_token_ms(record)),
        "icl_ms": summarise(gap for record in streamed for gap in inter_chunk_ms(record)),
        "tokens_per_chunk": _tokens_per_chunk(streamed),
        "tpot_ms": summarise(value for record in streamed if (value := tpot_ms(record)) is not None),
        "e2e_ms": summarise(record.e2e_ms for record in good),
        "queue_ms": summarise(record.queue_ms for record in good if record.queue_ms is not None),
        "retries": sum(record.retries for record in records),
        **(engine or EngineFigures()).as_results(),
        **(processes or ProcessFigures()).as_results(),
    }


def _carrying(record: RequestRecord) -> list[tuple[float, int]]:
    """The chunks with tokens: an empty one tells nothing about when tokens came."""
    return [(at, tokens) for at, tokens in record.chunks if tokens]


def _tokens_per_chunk(records: Sequence[RequestRecord]) -> float | None:
    counts = [tokens for record in records for _, tokens in _carrying(record)]
    return sum(counts) / len(counts) if counts else None
