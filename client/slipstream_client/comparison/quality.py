"""Whether every batcher gave the same answers: greedy output ids compared request by request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from slipstream_client.load.records import RequestRecord


def compare_answers(records: Iterable[RequestRecord]) -> dict[str, Any]:
    """What results.json says of quality: each answer against the first one that was given to the same request.

    Failed requests have no answer to compare. `equal` is None where nothing could be compared.
    """
    references: dict[int, RequestRecord] = {}
    compared, different = 0, []
    for record in records:
        if record.error is not None or record.output_ids is None:
            continue
        reference = references.setdefault(record.index, record)
        if reference is record:
            continue
        compared += 1
        if record.output_ids != reference.output_ids:
            assert reference.output_ids is not None
            at = first_difference(reference.output_ids, record.output_ids)
            different.append({"request": record.id, "reference": reference.id, "first_difference": at})
    return {"equal": not different if compared else None, "compared": compared, "different": different}


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Index of the first token that differs; the shorter length where one begins with the other."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))
