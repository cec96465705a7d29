"""What is kept of one request of a comparison: one line of requests.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Phase = Literal["warm_up", "measured", "cool_down"]


@dataclass(slots=True)
class RequestRecord:
    """Times are seconds from the start of the run; `sent` is of the first attempt, `chunks` of the last.

    `intended` is when the request's turn came: its planned arrival, or in a closed loop when its client became free.
    """

    id: str
    run: str  # its id in results.json
    index: int  # in the workload
    intended: float
    phase: Phase = "measured"
    sent: float | None = None
    first: float | None = None  # of the first chunk that carried a token; None where the batcher does not stream
    last: float | None = None  # of the last response, or of the failure
    chunks: list[tuple[float, int]] = field(default_factory=list)  # time and output tokens of every response
    input_tokens: int | None = None
    output_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    error_code: str | None = None
    retries: int = 0
    output_ids: list[int] | None = None
    stats: dict[str, Any] | None = None

    @property
    def e2e_ms(self) -> float:
        """From the first sending to the last response; only for a request that was answered."""
        assert self.last is not None
        assert self.sent is not None
        return (self.last - self.sent) * 1000


def write_records(path: Path, records: Iterable[RequestRecord]) -> None:
    """Write one JSON object a line."""
    with path.open("w", encoding="utf-8") as lines:
        for record in records:
            lines.write(json.dumps(asdict(record)) + "\n")
