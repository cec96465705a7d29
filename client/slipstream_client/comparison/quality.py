"""Whether every batcher gave the same answers: greedy output ids compared request by request.

What runs on the native executor must agree in every token. Another executor computes with other kernels and in another
precision, so that near ties fall differently: how many of its answers agree is counted, and how near the first ties
were that did not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slipstream_client.load.records import RequestRecord

NATIVE = "native"


def compare_answers(records: Iterable[RequestRecord], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What results.json says of quality, from the records of `runs`, its entries of these.

    `different` are the native answers that are not the first one that was given to the same request; `equal` is None
    where nothing could be compared. `agreement` counts, for each variant of another executor, its answers that are the
    native ones. Failed requests have no answer to compare.
    """
    by_id = {run["id"]: run for run in runs}
    answered = [r for r in records if r.error is None and r.output_ids is not None and r.run in by_id]
    native = [record for record in answered if by_id[record.run]["executor"] == NATIVE]
    references: dict[tuple[str, int], RequestRecord] = {}
    compared, different = 0, []
    for record in native:
        reference = references.setdefault((by_id[record.run]["workload"], record.index), record)
        if reference is record:
            continue
        compared += 1
        if record.output_ids != reference.output_ids:
            different.append(_difference(record, reference))
    agreement: dict[str, dict[str, Any]] = {}
    for record in answered:
        run = by_id[record.run]
        native_answer = references.get((run["workload"], record.index))
        if run["executor"] == NATIVE or native_answer is None:
            continue
        seen = agreement.setdefault(run["variant"], {"compared": 0, "agree": 0, "different": []})
        seen["compared"] += 1
        if record.output_ids == native_answer.output_ids:
            seen["agree"] += 1
        else:
            seen["different"].append(_difference(record, native_answer))
    return {
        "equal": not different if compared else None,
        "compared": compared,
        "different": different,
        "agreement": agreement,
    }


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Index of the first token that differs; the shorter length where one begins with the other."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


def _difference(record: RequestRecord, reference: RequestRecord) -> dict[str, Any]:
    assert record.output_ids is not None
    assert reference.output_ids is not None
    at = first_difference(reference.output_ids, record.output_ids)
    return {"request": record.id, "reference": reference.id, "first_difference": at}
