"""Every target of the load generator at the real server: what one notes of a workload the others note too."""

from __future__ import annotations

import asyncio

import pytest

from slipstream_client.load.arrivals import ClosedLoop, OpenLoop
from slipstream_client.load.generator import LoadOptions, run_load
from slipstream_client.load.records import RequestRecord
from slipstream_client.load.targets import make_target
from slipstream_client.load.workload import make_workload
from slipstream_client.server.tritonserver import TritonServer

pytestmark = pytest.mark.server

WORKLOAD = make_workload("fixed:6,5", 4)


def load(server: TritonServer, target: str, model: str, arrivals: ClosedLoop | OpenLoop) -> list[RequestRecord]:
    records: list[RequestRecord] = []

    async def send() -> None:
        url = server.grpc_url if target == "grpc" else server.http_url
        async with make_target(target, url, model, timeout_s=60) as entered:
            options = LoadOptions(f"{model}/fixed/{arrivals.label}/0", arrivals)
            await run_load(entered, WORKLOAD.requests, options, records)

    asyncio.run(send())
    return sorted(records, key=lambda record: record.index)


@pytest.fixture(scope="module")
def reference(shared_server: TritonServer) -> list[list[int] | None]:
    """The ids of every answer."""
    return [record.output_ids for record in load(shared_server, "grpc", "continuous", ClosedLoop(1))]


@pytest.mark.parametrize(
    ("target", "model"),
    [
        ("grpc", "continuous"),
        ("grpc", "iterative"),
        ("grpc", "continuous_unary"),
        ("grpc", "static"),
        ("generate_stream", "continuous"),
        ("generate_stream", "iterative"),
        ("infer", "continuous_unary"),
        ("infer", "dynamic"),
        ("infer", "static"),
    ],
)
@pytest.mark.parametrize("arrivals", [ClosedLoop(2), OpenLoop(100)], ids=["closed", "open"])
def test_every_target_notes_the_same_of_every_request(
    server: TritonServer,
    reference: list[list[int] | None],
    target: str,
    model: str,
    arrivals: ClosedLoop | OpenLoop,
) -> None:
    records = load(server, target, model, arrivals)
    assert [(record.error, record.output_tokens, record.finish_reason) for record in records] == [
        (None, 5, "stop")
    ] * len(WORKLOAD.requests)
    assert [record.output_ids for record in records] == reference
    assert [record.input_tokens for record in records] == [request.input_tokens for request in WORKLOAD.requests]
    streams = model in ("continuous", "iterative")
    assert [record.first is not None for record in records] == [streams] * len(records)
    assert all(record.stats and record.stats["inference_ms"] > 0 for record in records)
    assert all(record.sent <= record.chunks[0][0] <= record.last for record in records)


@pytest.mark.parametrize(
    ("target", "model"), [("grpc", "continuous"), ("generate_stream", "continuous"), ("infer", "dynamic")]
)
def test_a_refusal_has_its_code(server: TritonServer, target: str, model: str) -> None:
    async def send() -> list[RequestRecord]:
        records: list[RequestRecord] = []
        url = server.grpc_url if target == "grpc" else server.http_url
        too_long = make_workload("fixed:9000,5", 1).requests
        async with make_target(target, url, model, timeout_s=60) as entered:
            await run_load(entered, too_long, LoadOptions("run", ClosedLoop(1)), records)
        return records

    (record,) = asyncio.run(send())
    assert (record.error_code, record.output_tokens, record.retries) == ("INVALID_ARGUMENT", 0, 0)
