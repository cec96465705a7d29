"""Points as they are typed on the command line."""

from __future__ import annotations

import math
import re

import pytest

from slipstream_client.errors import SlipstreamError
from slipstream_client.load.sweep import rates, whole_numbers


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("16", (16,)),
        ("1,4,16", (1, 4, 16)),
        ("4, 1,4", (4, 1)),
        ("1:16:5", (1, 6, 11, 16)),
        ("1:15:5", (1, 6, 11)),
        ("2:4", (2, 3, 4)),
        ("8:8:3", (8,)),
        ("1,2:6:2,64", (1, 2, 4, 6, 64)),
    ],
)
def test_whole_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert whole_numbers("--concurrency", text) == numbers


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0.5", (0.5,)),
        ("1,2,4,inf", (1.0, 2.0, 4.0, math.inf)),
        ("0.1:0.5:0.1", (0.1, 0.2, 0.3, 0.4, 0.5)),
        ("1:3", (1.0, 2.0, 3.0)),
    ],
)
def test_rates(text: str, numbers: tuple[float, ...]) -> None:
    assert rates("--request-rate", text) == numbers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--concurrency '' is no list of whole numbers"),
        ("1,,2", "is no list of whole numbers"),
        ("2.5", "is no list of whole numbers"),
        ("inf", "is no list of whole numbers"),
        ("0,1", "--concurrency '0,1': every number must be at least 1"),
        ("0:4", "every number must be at least 1"),
        ("8:1", "a range is first:last or first:last:step, ascending, of at most 1000 numbers"),
        ("1:8:0", "a range is first:last"),
        ("1:8:-1", "a range is first:last"),
        ("1:8:2:1", "a range is first:last"),
        ("1:1001", "of at most 1000 numbers"),
    ],
)
def test_what_is_no_list_of_whole_numbers_is_refused(text: str, message: str) -> None:
    with pytest.raises(SlipstreamError, match=re.escape(message)):
        whole_numbers("--concurrency", text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast", "--request-rate 'fast' is no list of numbers"),
        ("0", "--request-rate '0': every number must be above 0"),
        ("nan", "every number must be above 0"),
        ("1:inf", "a range is first:last"),
        ("1:2:nan", "a range is first:last"),
    ],
)
def test_what_is_no_list_of_rates_is_refused(text: str, message: str) -> None:
    with pytest.raises(SlipstreamError, match=re.escape(message)):
        rates("--request-rate", text)
