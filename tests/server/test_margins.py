"""How near the tie was that another executor decided differently, asked of the real server."""

from __future__ import annotations

import pytest

from slipstream_client.client import SlipstreamClient
from slipstream_client.comparison.margins import add_margins
from slipstream_client.load.records import RequestRecord
from slipstream_client.load.workload import make_workload
from slipstream_client.server.tritonserver import TritonServer

pytestmark = pytest.mark.server


def test_a_margin_is_the_difference_of_the_two_tokens_log_probabilities(server: TritonServer) -> None:
    request = make_workload("fixed:6,4", 1).requests[0]
    with SlipstreamClient(server.grpc_url) as client:
        answer = client.generate(request.text, **request.sampling(), logprobs=20)
    assert answer.output_ids is not None
    assert answer.logprobs is not None
    likeliest = {int(token): scores["logprob"] for token, scores in answer.logprobs[2].items()}
    second = sorted(likeliest, key=lambda token: -likeliest[token])[1]
    unlikely = next(token for token in range(100) if token not in likeliest)

    def record(id: str, ids: list[int]) -> RequestRecord:
        return RequestRecord(id, id.partition("/")[0], 0, 0.0, output_ids=ids)

    native = record("native/0", answer.output_ids)
    begun = answer.output_ids[:2]
    others = {"near": ([*begun, second, 1], 2), "far": ([*begun, unlikely], 2), "cut": (answer.output_ids[:3], 3)}
    records = [native, *(record(f"{name}/0", ids) for name, (ids, _) in others.items())]
    agreement = {
        name: {"different": [{"request": f"{name}/0", "reference": "native/0", "first_difference": at}]}
        for name, (_, at) in others.items()
    }
    add_margins(agreement, records, {"native": {0: request}}, server.grpc_url, "continuous")
    margins = {name: seen["different"][0]["margin"] for name, seen in agreement.items()}
    assert margins["near"] == pytest.approx(likeliest[answer.output_ids[2]] - likeliest[second])
    assert margins["near"] > 0
    assert (margins["far"], margins["cut"]) == (None, None)
