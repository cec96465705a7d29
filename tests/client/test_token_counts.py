"""How many tokens each response carried, by hand, for every style of counts and texts that servers have."""

from __future__ import annotations

import pytest

from slipstream_client.load.targets.token_counts import from_counts, from_totals

DELTAS = ["The", " end", " of", " it"]
CUMULATIVE = ["The", "The end", "The end of", "The end of it"]


@pytest.mark.parametrize(
    ("texts", "counts", "tokens"),
    [
        # Without counts: what is new is one token.
        (DELTAS, [None] * 4, [1, 1, 1, 1]),
        (CUMULATIVE, [None] * 4, [1, 1, 1, 1]),
        ([*DELTAS, "The end of it"], [None] * 5, [1, 1, 1, 1, 0]),
        ([*DELTAS, "The end of it."], [None] * 5, [1, 1, 1, 1, 1]),
        ([*CUMULATIVE, "The end of it"], [None] * 5, [1, 1, 1, 1, 0]),
        (["", "The", "", " end", ""], [None] * 5, [0, 1, 0, 1, 0]),
        (["ha", "ha"], [None] * 2, [1, 1]),
        (["ha", "ha", "ha"], [None] * 3, [1, 1, 1]),
        (["ha"], [None], [1]),
        ([], [], []),
        # With counts: they are right, unless they repeat as the texts do.
        (DELTAS, [1, 2, 1, 4], [1, 2, 1, 4]),
        ([*DELTAS, "The end of it"], [1, 1, 1, 1, 0], [1, 1, 1, 1, 0]),
        ([*DELTAS, "The end of it"], [1, 2, 1, 1, 5], [1, 2, 1, 1, 0]),
        ([*DELTAS, "The end of it."], [1, 2, 1, 1, 6], [1, 2, 1, 1, 1]),
        (CUMULATIVE, [1, 1, 1, 1], [1, 1, 1, 1]),
        (CUMULATIVE, [1, 3, 4, 6], [1, 2, 1, 2]),
        (["ha", "ha", "ha"], [1, 1, 1], [1, 1, 1]),
        (["ab", ""], [3, 1], [3, 1]),
        # With the last response alone: of all of them.
        (DELTAS, [None, None, None, 4], [1, 1, 1, 1]),
        (["", *DELTAS], [0, None, None, None, 5], [0, 2, 1, 1, 1]),
    ],
)
def test_counts_of_each_response(texts: list[str], counts: list[int | None], tokens: list[int]) -> None:
    assert from_counts(texts, counts) == tokens


@pytest.mark.parametrize(
    ("texts", "totals", "tokens"),
    [
        (DELTAS, [1, 3, 4, 8], [1, 2, 1, 4]),
        # A token whose text is not complete yet, and a last event that has usage alone.
        (["The", "", " end", ""], [1, 2, 3, 3], [1, 1, 1, 0]),
        # Usage of the whole only: shares, of which the first is never empty.
        ([*DELTAS, ""], [None, None, None, None, 4], [1, 1, 1, 1, 0]),
        ([*DELTAS, ""], [None, None, None, None, 10], [3, 2, 3, 2, 0]),
        ([*DELTAS, ""], [None, None, None, None, 2], [1, 0, 1, 0, 0]),
        (["", "", ""], [None, None, 3], [0, 0, 3]),
        (["", "", ""], [None, None, 0], [0, 0, 0]),
        # No usage: one for each text.
        (["", *DELTAS], [None] * 5, [0, 1, 1, 1, 1]),
    ],
)
def test_totals_so_far(texts: list[str], totals: list[int | None], tokens: list[int]) -> None:
    assert from_totals(texts, totals) == tokens
