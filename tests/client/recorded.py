"""Records and runs made by hand, for the figures and the statistics."""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream_client.comparison.samples import RunSamples
from slipstream_client.load.records import RequestRecord


def record(index: int = 0, *, sent: float = 1.0, chunks: Any = (), streams: bool = True, **more: Any) -> RequestRecord:
    """A record of the chunks (time, tokens) of one answer."""
    carrying = [at for at, tokens in chunks if tokens]
    fields: dict[str, Any] = {
        "id": f"r{index}",
        "run": "continuous/mixed/c2/0",
        "index": index,
        "intended": sent,
        "sent": sent,
        "first": carrying[0] if streams and carrying else None,
        "last": chunks[-1][0] if chunks else None,
        "chunks": list(chunks),
        "output_tokens": sum(tokens for _, tokens in chunks),
    }
    return RequestRecord(**fields | more)


def samples(
    variant: str,
    repeat: int,
    e2e_ms: Any,
    *,
    point: str = "c8",
    closed: bool = True,
    window_s: float = 1.0,
    tokens: Any = None,
    ttft_ms: Any = None,
) -> RunSamples:
    """A run whose requests took `e2e_ms`, NaN where they failed; ten tokens each, and no TTFT, unless given."""
    e2e = np.asarray(e2e_ms, dtype=float)
    return RunSamples(
        variant=variant,
        workload="mixed",
        point=point,
        repeat=repeat,
        closed=closed,
        window_s=window_s,
        tokens=np.where(np.isnan(e2e), 0.0, 10.0) if tokens is None else np.asarray(tokens, dtype=float),
        flight_s=np.nan_to_num(e2e) / 1000,
        e2e_ms=e2e,
        ttft_ms=np.full(len(e2e), np.nan) if ttft_ms is None else np.asarray(ttft_ms, dtype=float),
    )
