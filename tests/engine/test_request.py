"""When a sequence ends, and with which reason."""

from __future__ import annotations

import pytest

from scripted import make_request, output_of
from slipstream.engine.request import SamplingParams

EOS = frozenset({3, 4})


def feed(token_ids: list[int], **sampling: object) -> tuple[list[int], str | None]:
    """Append tokens until the request ends; what it then holds and why it ended."""
    request = make_request(0, 5, **{"max_tokens": 100, **sampling})  # type: ignore[arg-type]
    request.know_end_of_sequence(EOS)
    for token_id in token_ids:
        if request.finished:
            break
        request.append(token_id, now=1.0)
    return output_of(request), request.finish_reason


@pytest.mark.parametrize(
    ("sampling", "output", "reason"),
    [
        ({}, [7, 8, 3], "stop"),
        ({"ignore_eos": True}, [7, 8, 3, 9, 4, 9], None),
        ({"max_tokens": 2}, [7, 8], "length"),
        ({"max_tokens": 3}, [7, 8, 3], "stop"),  # both hold: the model has said that it is done
        ({"stop_token_ids": (8,)}, [7, 8], "stop"),
        ({"stop_token_ids": (9,), "ignore_eos": True}, [7, 8, 3, 9], "stop"),
        ({"stop_length": 2}, [7, 8], "stop"),
        ({"stop_length": 2, "max_tokens": 2}, [7, 8], "stop"),
        ({"stop_length": 4, "ignore_eos": True}, [7, 8, 3, 9], "stop"),
        ({"stop_length": 6}, [7, 8, 3], "stop"),
        ({"stop_length": 9, "max_tokens": 4, "ignore_eos": True}, [7, 8, 3, 9], "length"),
    ],
)
def test_a_sequence_ends_by_the_first_condition_that_holds(
    sampling: dict[str, object], output: list[int], reason: str | None
) -> None:
    assert feed([7, 8, 3, 9, 4, 9], **sampling) == (output, reason)


def test_a_failed_sample_ends_the_request_without_a_token() -> None:
    """SAM-02: logits that are not finite end the request with an error."""
    request = make_request(0, 5, max_tokens=10)
    request.append(7, now=1.0)
    request.append(-1, now=2.0)
    assert (output_of(request), request.finish_reason) == ([7], "error")
    assert request.error == "the model's logits were not finite"


def test_times_are_those_of_the_first_token_and_of_the_end() -> None:
    request = make_request(0, 5, max_tokens=3)
    for now in (1.0, 2.0, 3.0):
        request.append(7, now)
    assert (request.first_token_time, request.finish_time) == (1.0, 3.0)


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (5e-324, True), (9.9e-6, True), (1e-5, False)])
def test_a_tiny_temperature_is_greedy(temperature: float, greedy: bool) -> None:
    """SAM-01: below the documented epsilon."""
    assert SamplingParams(max_tokens=1, temperature=temperature).greedy == greedy
