"""What is measured of one request, and how each figure is defined.

* TTFT: from sending to the first chunk that carries a token; none where the batcher does not stream.
* E2E: from sending to the last response.
* ITL: the gap between two chunks, divided by the tokens of the later one and counted once for each of them.
* ICL: the same gap, raw, once for each chunk.
* TPOT: from the first to the last chunk with tokens, divided by (output tokens - 1); none for a single token.
* queue: E2E less the time for which the engine had the request in service.

TTFT and E2E are also given from the intended time, which is what the user waited: where requests wait at the client,
because the server stands still or a limit holds them back, a latency from sending leaves that out ("coordinated
omission").
"""

from __future__ import annotations

from itertools import pairwise

from slipstream_client.load.records import RequestRecord


def succeeded(record: RequestRecord) -> bool:
    """Answered to the end, and as was asked."""
    return record.error is None and record.sent is not None and record.last is not None


def ttft_ms(record: RequestRecord) -> float | None:
    """Time to first token; None where the batcher does not stream."""
    if record.first is None or record.sent is None:
        return None
    return (record.first - record.sent) * 1000


def ttft_intended_ms(record: RequestRecord) -> float | None:
    """Time to first token from the intended time; None where the batcher does not stream."""
    return None if record.first is None else (record.first - record.intended) * 1000


def e2e_intended_ms(record: RequestRecord) -> float:
    """From the intended time to the last response; only for a request that was answered."""
    assert record.last is not None
    return (record.last - record.intended) * 1000


def inter_token_ms(record: RequestRecord) -> list[float]:
    """One gap for each output token after those of the first chunk."""
    tokens = [tokens for _, tokens in carrying(record)[1:]]
    return [gap / count for gap, count in zip(inter_chunk_ms(record), tokens, strict=True) for _ in range(count)]


def inter_chunk_ms(record: RequestRecord) -> list[float]:
    """The raw gaps between chunks that carry tokens."""
    times = [at for at, _ in carrying(record)]
    return [(at - before) * 1000 for before, at in pairwise(times)]


def tpot_ms(record: RequestRecord) -> float | None:
    """Time per output token after the first; None where that is undefined."""
    if record.first is None or record.output_tokens < 2:
        return None
    last, _ = carrying(record)[-1]
    return (last - record.first) * 1000 / (record.output_tokens - 1)


def queue_ms(record: RequestRecord) -> float | None:
    """The time of an answered request in which the engine did not serve it; None where the server does not say."""
    inference_ms = (record.stats or {}).get("inference_ms")
    return None if inference_ms is None else max(record.e2e_ms - inference_ms, 0.0)


def carrying(record: RequestRecord) -> list[tuple[float, int]]:
    """The chunks with tokens: an empty one tells nothing about when tokens came."""
    return [(at, tokens) for at, tokens in record.chunks if tokens]
