"""One record per step, in a ring buffer: what was computed, what was wasted, and where the time went."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class StepRecord:
    """Times in seconds; rows are tokens put through the model."""

    index: int
    start_s: float
    prefill_rows: int  # all useful rows that are not decode rows
    decode_rows: int  # of sequences of which nothing but the newest output token was computed
    padding_rows: int  # rows that served no request
    running: int
    waiting: int
    preemptions: int
    kv_blocks_used: int
    kv_tokens_held: int
    schedule_s: float
    sampled_rows: int = 0  # tokens generated; a row whose logits were not finite gives none
    run_s: float = 0.0
    update_s: float = 0.0


class StepRecords:
    """The last `capacity` steps."""

    def __init__(self, capacity: int = 4096) -> None:
        self._records: deque[StepRecord] = deque(maxlen=capacity)

    def append(self, record: StepRecord) -> None:
        self._records.append(record)

    def last(self, count: int) -> list[dict[str, Any]]:
        """The newest `count` records, oldest first."""
        return [asdict(record) for record in list(self._records)[-count:]] if count > 0 else []
