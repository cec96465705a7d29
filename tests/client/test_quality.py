"""Which answers agree, on records whose differences are known."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream_client.comparison.quality import compare_answers, first_difference
from slipstream_client.load.records import RequestRecord


def run(id: str, workload: str = "mixed", executor: str = "native") -> dict[str, Any]:
    return {"id": id, "variant": id.partition("/")[0], "workload": workload, "executor": executor}


def answered(run_id: str, index: int, ids: list[int] | None, error: str | None = None) -> RequestRecord:
    return RequestRecord(f"{run_id}/{index:05d}", run_id, index, 0.0, output_ids=ids, error=error)


def test_each_answer_is_compared_with_the_first_to_the_same_request_of_the_same_workload() -> None:
    runs = [run("a/1"), run("b/1"), run("a/2", "equal"), run("b/2", "equal")]
    records = [
        answered("a/1", 0, [1, 2, 3]),
        answered("a/1", 1, [4]),
        answered("b/1", 0, [1, 2, 9]),
        answered("b/1", 1, [4]),
        answered("a/2", 0, [7]),
        answered("b/2", 0, [7]),
        answered("b/1", 2, [5], error="failed"),
        answered("b/1", 3, None),
        answered("a/unfinished", 0, [0]),
    ]
    assert compare_answers(records, runs) == {
        "equal": False,
        "compared": 3,
        "different": [{"request": "b/1/00000", "reference": "a/1/00000", "first_difference": 2}],
        "agreement": {},
    }
    assert compare_answers(records[:2], runs)["equal"] is None


def test_another_executor_is_counted_apart_and_is_no_reference() -> None:
    runs = [run("dynamic (transformers)/1", executor="transformers"), run("dynamic/1"), run("continuous/1")]
    records = [
        answered("dynamic (transformers)/1", 0, [1, 5]),
        answered("dynamic (transformers)/1", 1, [3]),
        answered("dynamic/1", 0, [1, 2]),
        answered("continuous/1", 0, [1, 2]),
        answered("continuous/1", 1, [3]),
    ]
    quality = compare_answers(records, runs)
    assert (quality["equal"], quality["compared"], quality["different"]) == (True, 1, [])
    different = [{"request": "dynamic (transformers)/1/00000", "reference": "dynamic/1/00000", "first_difference": 1}]
    assert quality["agreement"] == {"dynamic (transformers)": {"compared": 2, "agree": 1, "different": different}}


@pytest.mark.parametrize(
    ("one", "other", "at"), [([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [1], 0), ([5, 6], [5, 6], 2)]
)
def test_the_first_difference_is_where_they_part(one: list[int], other: list[int], at: int) -> None:
    assert first_difference(one, other) == at
