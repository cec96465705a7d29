"""`slipstream top` and the latencies it reads, against the real server."""

from __future__ import annotations

import json
import math

import pytest
from typer.testing import CliRunner

from helpers import PROMPTS, GrpcStream, ask, generate
from observing import Metrics, wait_until_at_rest
from slipstream_client import cli
from slipstream_client.server.tritonserver import TritonServer

pytestmark = pytest.mark.server

LATENCIES = ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")


def buckets(metrics: Metrics, name: str, engine: str) -> dict[float, float]:
    edges = {labels["le"] for sample, labels, _ in metrics._samples if sample == f"slipstream_{name}_bucket"}
    return {float(edge): metrics.value(f"{name}_bucket", engine, le=edge) for edge in edges}


def test_latencies_are_counted_once_a_request_and_once_a_token(server: TritonServer) -> None:
    wait_until_at_rest(server, ["continuous"])
    before = Metrics(server)
    answers = [ask(server, "continuous", prompt, max_tokens=5, ignore_eos=True) for prompt in PROMPTS[:3]]
    with GrpcStream(server) as stream:
        stream.send("continuous", PROMPTS[0], request_id="cancelled", max_tokens=400, ignore_eos=True)
        stream.receive()
        assert generate(server, "continuous", {"id": "cancelled", "cancel": True})[0] == 200
        stream.cancel()
    wait_until_at_rest(server, ["continuous"])
    after = Metrics(server)

    def added(name: str) -> float:
        return after.value(name, "continuous") - before.value(name, "continuous")

    tokens = added("generation_tokens_total")
    assert tokens > 3 * 5
    assert added("time_to_first_token_seconds_count") == 4
    assert added("inter_token_latency_seconds_count") == tokens - 4
    assert added("e2e_request_latency_seconds_count") == 3, "a cancelled request did not come to its end"
    for name in LATENCIES:
        counts = buckets(after, name, "continuous")
        ordered = [counts[edge] for edge in sorted(counts)]
        assert ordered == sorted(ordered)
        assert counts[math.inf] == after.value(f"{name}_count", "continuous")
    ended = sum(answer.stats["queue_ms"] + answer.stats["inference_ms"] for answer in answers)
    assert added("e2e_request_latency_seconds_sum") == pytest.approx(ended / 1000, abs=1e-4)


def test_top_shows_every_engine_and_what_it_did(server: TritonServer) -> None:
    before = Metrics(server).value("generation_tokens_total", "continuous")
    ask(server, "continuous", PROMPTS[0], max_tokens=8, ignore_eos=True)
    wait_until_at_rest(server, ["continuous"])
    result = CliRunner().invoke(
        cli.make_app([]), ["top", "--url", server.metrics_url, "--once", "--interval", "0.1", "--json"]
    )
    assert result.exit_code == 0, result.output
    engines = {engine["engine"]: engine for engine in json.loads(result.stdout)["engines"]}
    assert list(engines) == ["continuous", "dynamic", "iterative", "static"]
    assert {(engine["up"], engine["running"], engine["kv_blocks_total"]) for engine in engines.values()} == {
        (True, 0, 2184)
    }
    assert [engine["streams"] for engine in engines.values()] == [True, False, True, False]
    assert Metrics(server).value("generation_tokens_total", "continuous") == before + 8
