"""Clients that choose the ids of `iterative` sequences themselves: nobody gets another's tokens, and all get an answer.

Triton numbers plain requests 1, 2, 3, …, so that ids of clients meet those of others by chance.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from helpers import PROMPTS, GrpcStream, Refused, ask
from observing import wait_for_running, wait_until_at_rest
from slipstream_client.server.tritonserver import TritonServer

pytestmark = pytest.mark.server

REFUSED = "the sequence_id belongs to another request or to none"
# Long enough to be met while it runs.
MAX_TOKENS = 100
VICTIM, INTRUDER = PROMPTS[1], PROMPTS[0]
sequence_ids = itertools.count(900)


def answer(server: TritonServer, prompt: str, **sequence: Any) -> list[int] | str:
    """The ids of an answer, or the text of the refusal."""
    with GrpcStream(server) as stream:
        try:
            return (
                stream.send("iterative", prompt, max_tokens=MAX_TOKENS, ignore_eos=True, sequence=sequence).answer().ids
            )
        except Refused as refused:
            return refused.text


@pytest.fixture(scope="module")
def alone(shared_server: TritonServer) -> list[int]:
    return ask(shared_server, "iterative", VICTIM, max_tokens=MAX_TOKENS, ignore_eos=True).ids


def collide(server: TritonServer, intruders: list[tuple[str, dict[str, Any]]]) -> list[list[int] | str]:
    """The answers of a sequence and of those that come with its id while it runs."""
    number = next(sequence_ids)
    with ThreadPoolExecutor() as pool:
        victim = pool.submit(answer, server, VICTIM, sequence_id=number, sequence_start=True)
        wait_for_running(server, "iterative", 1)
        others = [pool.submit(answer, server, prompt, sequence_id=number, **flags) for prompt, flags in intruders]
        return [victim.result(timeout=30), *(other.result(timeout=30) for other in others)]


@pytest.mark.parametrize("count", [1, 3])
def test_who_starts_a_sequence_with_the_id_of_another_is_refused(
    server: TritonServer, alone: list[int], count: int
) -> None:
    victim, *others = collide(server, [(INTRUDER, {"sequence_start": True})] * count)
    assert victim == alone
    assert all(isinstance(other, str) and other.startswith(REFUSED) for other in others)


@pytest.mark.parametrize(
    ("prompt", "flags"),
    [
        (VICTIM, {"sequence_start": True}),  # of two that cannot be told apart neither is answered
        (INTRUDER, {}),  # the others end the sequence in Triton itself
        (INTRUDER, {"sequence_end": True}),
        (INTRUDER, {"sequence_start": True, "sequence_end": True}),
    ],
)
def test_a_sequence_that_another_request_ends_is_told_so(
    server: TritonServer, prompt: str, flags: dict[str, bool]
) -> None:
    answers = collide(server, [(prompt, flags)])
    assert all(isinstance(each, str) and each.startswith(REFUSED) for each in answers), answers


def test_a_sequence_of_one_request_alone_is_refused(server: TritonServer, alone: list[int]) -> None:
    """Triton reschedules nothing that says that it ends."""
    text = answer(server, INTRUDER, sequence_id=next(sequence_ids), sequence_start=True, sequence_end=True)
    assert isinstance(text, str)
    assert text.startswith(REFUSED)
    assert answer(server, VICTIM, sequence_id=next(sequence_ids), sequence_start=True) == alone


def test_after_collisions_everybody_is_answered(server: TritonServer, alone: list[int]) -> None:
    """Not that Triton has all its slots again at once: those of collisions are taken until they have been idle."""
    for flags in ({"sequence_start": True}, {"sequence_end": True}):
        collide(server, [(INTRUDER, flags)])
    wait_until_at_rest(server, ["iterative"])
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda _: answer(server, VICTIM), range(16))) == [alone] * 16
