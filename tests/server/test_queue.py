"""More requests at once than an engine has seats for: each waits its turn, and none is lost."""

from __future__ import annotations

from collections import Counter

import pytest

from helpers import PROMPTS, GrpcStream, Refused, ask
from slipstream_client.server.tritonserver import TritonServer

pytestmark = pytest.mark.server

BURST = 210


@pytest.mark.parametrize("model", ["continuous", "iterative"])
def test_a_burst_at_a_long_queue_is_answered_to_the_last(
    server: TritonServer, golden: dict[str, list[int]], model: str
) -> None:
    num_requests = BURST if model == "continuous" else BURST // 3
    with GrpcStream(server) as stream:
        for number in range(num_requests):
            prompt = PROMPTS[number % 2]
            stream.send(model, prompt, request_id=f"{number}", stream=False, max_tokens=1)
        answers = [stream.receive() for _ in range(num_requests)]
        assert stream.quiet
    assert sorted(int(answer.request_id) for answer in answers) == list(range(num_requests))
    assert all(answer.final for answer in answers)
    ids = Counter(answer.outputs["stats"][0].rpartition('"output_ids": ')[2] for answer in answers)
    assert ids == {f"[{golden[prompt][0]}]}}": num_requests // 2 for prompt in PROMPTS[:2]}


def test_first_come_first_served_says_that_it_ignores_priority_and_tenant(server: TritonServer) -> None:
    for model in ("continuous", "continuous_unary"):
        stats = ask(server, model, PROMPTS[0], max_tokens=1, priority=-1, tenant="gold").stats
        assert stats["ignored"] == ["priority", "tenant"]
    for model in ("static", "dynamic", "iterative"):
        for field in ({"priority": 1}, {"tenant": "gold"}):
            with pytest.raises(Refused, match=f"{next(iter(field))} is not supported by this model"):
                ask(server, model, PROMPTS[0], max_tokens=1, **field)
