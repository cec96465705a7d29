"""Sampling: a seed gives the same text whatever runs beside it, and greedy is greedy however it is asked for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers import MODELS, PROMPTS, ask
from slipstream_client.server.tritonserver import TritonServer

pytestmark = pytest.mark.server

SEEDED = {"max_tokens": 12, "temperature": 0.9, "top_p": 0.95, "top_k": 50, "ignore_eos": True}


def test_a_seed_gives_the_same_tokens_alone_and_beside_eight_neighbours(server: TritonServer) -> None:
    alone = ask(server, "continuous", PROMPTS[0], seed=1234, **SEEDED).ids
    assert ask(server, "continuous", PROMPTS[0], seed=1234, **SEEDED).ids == alone
    with ThreadPoolExecutor(9) as pool:
        neighbours = [pool.submit(ask, server, "continuous", prompt, **SEEDED) for prompt in PROMPTS]
        beside = pool.submit(ask, server, "continuous", PROMPTS[0], seed=1234, **SEEDED)
        assert beside.result().ids == alone
        assert all(len(neighbour.result().ids) == 12 for neighbour in neighbours)


@pytest.mark.parametrize("model", MODELS)
def test_a_seed_gives_the_same_tokens_in_every_batcher(server: TritonServer, model: str) -> None:
    expected = ask(server, "continuous", PROMPTS[1], seed=99, **SEEDED).ids
    assert ask(server, model, PROMPTS[1], seed=99, **SEEDED).ids == expected


def test_other_seeds_and_no_seed_give_other_tokens(server: TritonServer) -> None:
    seeds = [{"seed": 1}, {"seed": 2}, {"seed": (1 << 64) - 1}, {}, {}]
    answers = [tuple(ask(server, "continuous", PROMPTS[0], **seed, **SEEDED).ids) for seed in seeds]
    assert len(set(answers)) == len(answers)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 0.0, "seed": 7},
        {"temperature": 1e-6},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": "0"},
    ],
    ids=str,
)
def test_greedy_is_greedy_however_it_is_asked_for(
    server: TritonServer, golden: dict[str, list[int]], sampling: dict[str, object]
) -> None:
    assert ask(server, "continuous", PROMPTS[2], max_tokens=8, **sampling).ids == golden[PROMPTS[2]][:8]
