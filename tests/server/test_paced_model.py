"""The load generator at the real server and a model that knows when it sent each token: it finds what the model did.

Client and model share the machine's monotonic clock. What lies between their times is transport: never below zero, and
on the median of the requests small also where the machine is busy.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream_client.comparison.request_figures import tpot_ms, ttft_ms
from slipstream_client.comparison.run_figures import window_s
from slipstream_client.load.arrivals import ClosedLoop
from slipstream_client.load.generator import LoadOptions, run_load
from slipstream_client.load.records import RequestRecord
from slipstream_client.load.targets import make_target
from slipstream_client.load.workload import make_workload
from slipstream_client.server.tritonserver import TritonServer

pytestmark = pytest.mark.server

REPOSITORY = Path(__file__).parents[2] / "benchmarks" / "paced"
FIRST_TOKEN_S, TOKEN_S = 0.2, 0.02  # as its config.pbtxt has them
TOKENS = 16
REQUESTS = 8
# One way, in the median; about 2 ms are usual.
TRANSPORT_MS = 50.0


@pytest.fixture(scope="module")
def paced() -> Iterator[TritonServer]:
    with TritonServer(("paced",), http_port=0, grpc_port=0, metrics_port=0, repository=REPOSITORY) as server:
        yield server


@pytest.fixture(scope="module", params=["grpc", "generate_stream"])
def records(paced: TritonServer, request: pytest.FixtureRequest) -> list[RequestRecord]:
    """Of one run of two clients; its times are those of the monotonic clock."""
    records: list[RequestRecord] = []

    async def send() -> float:
        url = paced.grpc_url if request.param == "grpc" else paced.http_url
        async with make_target(request.param, url, "paced", timeout_s=60) as target:
            workload = make_workload(f"fixed:32,{TOKENS}", REQUESTS)
            report = await run_load(target, workload.requests, LoadOptions("run", ClosedLoop(2)), records)
        return report.start_s

    start_s = asyncio.run(send())
    for record in records:
        record.sent += start_s
        record.first += start_s
        record.last += start_s
        record.chunks = [(at + start_s, tokens) for at, tokens in record.chunks]
    return records


def test_every_token_of_every_request_is_counted_once(records: list[RequestRecord]) -> None:
    assert [(record.error, record.finish_reason, record.input_tokens) for record in records] == [
        (None, "stop", 32)
    ] * REQUESTS
    assert [[tokens for _, tokens in record.chunks] for record in records] == [[1] * TOKENS] * REQUESTS


def test_nothing_is_noted_before_it_happened(records: list[RequestRecord]) -> None:
    for record in records:
        arrival, sent = record.stats["arrival_s"], record.stats["sent_s"]
        assert record.sent < arrival
        assert all(at >= arrival + FIRST_TOKEN_S + position * TOKEN_S for position, at in enumerate(sent))
        assert [noted > at for (noted, _), at in zip(record.chunks, sent, strict=True)] == [True] * TOKENS
        assert (record.first, record.last) == (record.chunks[0][0], record.chunks[-1][0])


def test_latencies_are_those_of_the_model_and_the_transport(records: list[RequestRecord]) -> None:
    def beyond(noted_ms: list[float], true_ms: list[float]) -> float:
        return statistics.median(noted - true for noted, true in zip(noted_ms, true_ms, strict=True))

    arrivals = [record.stats["arrival_s"] for record in records]
    sent = [record.stats["sent_s"] for record in records]
    true_ttft = [(times[0] - arrival) * 1000 for times, arrival in zip(sent, arrivals, strict=True)]
    true_e2e = [(times[-1] - arrival) * 1000 for times, arrival in zip(sent, arrivals, strict=True)]
    true_tpot = [(times[-1] - times[0]) * 1000 / (TOKENS - 1) for times in sent]
    assert 0 < beyond([ttft_ms(record) for record in records], true_ttft) < 2 * TRANSPORT_MS
    assert 0 < beyond([record.e2e_ms for record in records], true_e2e) < 2 * TRANSPORT_MS
    # Of the transport only the difference between the last token's and the first one's is in it.
    assert abs(beyond([tpot_ms(record) for record in records], true_tpot)) < TRANSPORT_MS / (TOKENS - 1)


def test_throughput_is_over_the_time_in_which_the_model_worked(records: list[RequestRecord]) -> None:
    worked = max(record.stats["sent_s"][-1] for record in records) - min(
        record.stats["arrival_s"] for record in records
    )
    assert REQUESTS / 2 * (FIRST_TOKEN_S + (TOKENS - 1) * TOKEN_S) <= worked < window_s(records)
    assert window_s(records) < worked + 2 * TRANSPORT_MS / 1000
