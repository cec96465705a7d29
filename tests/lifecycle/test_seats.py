"""More requests than there are seats, and a request for which there is no room at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers import CAUGHT, PROMPTS, GrpcStream, Refused, ask
from observing import occupancy, wait_for_running, wait_until
from spare import SPARE_SEATS, Spare

pytestmark = pytest.mark.server


def test_requests_wait_for_seats_and_say_so(spare: Spare) -> None:
    with ThreadPoolExecutor(SPARE_SEATS) as pool, GrpcStream(spare.server) as waiting:
        running = [pool.submit(ask, spare.server, "continuous", PROMPTS[0], **CAUGHT) for _ in range(SPARE_SEATS)]
        wait_for_running(spare.server, "continuous", SPARE_SEATS)
        waiting.send("continuous", PROMPTS[0], max_tokens=1)
        wait_until(lambda: occupancy(spare.server) == (SPARE_SEATS, 1), "the next request waits")
        assert waiting.answer().stats["waited_for"]["seats"] > 0
        for answer in running:
            assert answer.result().stats["waited_for"]["seats"] == 0


def test_iterative_requests_beyond_the_seats_wait_their_turn(spare: Spare, golden: dict[str, list[int]]) -> None:
    """Triton names more sequences than the engine has seats for."""
    with ThreadPoolExecutor(SPARE_SEATS + 2) as pool:
        answers = list(
            pool.map(lambda prompt: ask(spare.server, "iterative", prompt, max_tokens=6), PROMPTS[: SPARE_SEATS + 2])
        )
    assert [answer.ids for answer in answers] == [golden[prompt][:6] for prompt in PROMPTS[: SPARE_SEATS + 2]]


def test_a_request_larger_than_the_whole_pool_is_refused_with_the_numbers(spare: Spare) -> None:
    """This server's KV pool is smaller than the model's context."""
    prompt = "a" + " a" * 4000
    for model in ("continuous", "dynamic", "iterative"):
        with pytest.raises(Refused, match=r"tokens of KV cache.*the whole pool has \d+"):
            ask(spare.server, model, prompt, max_tokens=1)
