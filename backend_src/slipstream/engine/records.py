"""One record per step, in a ring buffer: what was computed, what for, and where the time went."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

_PAGE = 1000  # most records of one answer by `since`: about 300 KB of JSON


@dataclass(slots=True)
class StepRecord:
    """Times in seconds; rows are tokens put through the model, and each is of exactly one kind."""

    index: int
    start_s: float  # on the engine's clock
    prefill_rows: int  # computed for the first time, and no decode rows
    decode_rows: int  # of sequences of which nothing but the newest output token was computed
    recomputed_rows: int  # computed before, and lost when their sequence was preempted
    prompt_padding_rows: int  # before the shorter prompts of a lock-step batch
    finished_rows: int  # of sequences of a lock-step batch that have ended
    running: int
    waiting: int
    preemptions: int
    kv_blocks_used: int
    kv_tokens_held: int
    schedule_s: float
    sampled_rows: int = 0  # tokens generated; a row whose logits were not finite gives none
    left: int = 0  # requests in the engine after the step
    run_s: float = 0.0
    update_s: float = 0.0


class StepRecords:
    """The last `capacity` steps."""

    def __init__(self, capacity: int = 16384) -> None:
        self._records: deque[StepRecord] = deque(maxlen=capacity)

    def append(self, record: StepRecord) -> None:
        self._records.append(record)

    def asked_for(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The answer to a message of the control socket: the `last` n, or at most `count` from the step `since` on.

        Raises:
            TypeError, ValueError, OverflowError: one of these is no number.
        """
        if "since" in message:
            return self.since(int(message["since"]), min(int(message.get("count", _PAGE)), _PAGE))
        return self.last(int(message.get("last", 100)))

    def last(self, count: int) -> list[dict[str, Any]]:
        """The newest `count` records, oldest first."""
        return [asdict(record) for record in list(self._records)[-count:]] if count > 0 else []

    def since(self, index: int, count: int) -> list[dict[str, Any]]:
        """At most `count` records from the step `index` on, or from the oldest one that is still kept."""
        if not self._records:
            return []
        first = max(index - self._records[0].index, 0)
        return [asdict(record) for record in islice(self._records, first, first + count)]
