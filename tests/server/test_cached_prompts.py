"""Requests that begin alike, on the real server: what is found again, what is counted, and who shares."""

from __future__ import annotations

import pytest

from helpers import ask
from observing import Metrics, wait_until_at_rest
from slipstream_client.server.tritonserver import TritonServer

pytestmark = pytest.mark.server

BLOCK_SIZE = 16
PROMPT = "One " + "and one " * 30


def prefix_tokens(server: TritonServer) -> tuple[float, float]:
    """Tokens looked up, and tokens found."""
    wait_until_at_rest(server, ["continuous"])
    metrics = Metrics(server)
    return tuple(metrics.value(f"prefix_cache_{name}_total", "continuous") for name in ("queries", "hits"))


def test_the_same_beginning_is_computed_once_and_answers_the_same(server: TritonServer) -> None:
    """Also through the unary twin, which shares the engine; another salt shares nothing."""
    queried, hit = prefix_tokens(server)
    first = ask(server, "continuous", PROMPT, max_tokens=8, ignore_eos=True, cache_salt="a")
    again = ask(server, "continuous_unary", PROMPT, max_tokens=8, ignore_eos=True, cache_salt="a")
    other = ask(server, "continuous", PROMPT, max_tokens=8, ignore_eos=True, cache_salt="b")
    assert first.ids == again.ids == other.ids
    cached = (first.num_input_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert cached >= 3 * BLOCK_SIZE
    assert [answer.stats["cached_tokens"] for answer in (first, again, other)] == [0, cached, 0]
    assert prefix_tokens(server) == (queried + 3 * first.num_input_tokens, hit + cached)
    assert Metrics(server).value("kv_blocks_cached", "continuous") > 0


@pytest.mark.parametrize("model", ["dynamic", "iterative"])
def test_the_other_batchers_take_the_salt_and_say_that_they_ignore_it(server: TritonServer, model: str) -> None:
    answers = [ask(server, model, PROMPT, max_tokens=2, cache_salt="a") for _ in range(2)]
    assert [answer.stats["ignored"] for answer in answers] == [["cache_salt"]] * 2
    assert [answer.stats["cached_tokens"] for answer in answers] == [0, 0]
    assert "ignored" not in ask(server, "continuous", PROMPT, max_tokens=2, cache_salt="a").stats
