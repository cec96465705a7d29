"""What the metrics endpoint counts, against requests of which everything is known."""

from __future__ import annotations

import math

import pytest

from helpers import PROMPTS, GrpcStream, Refused, ask, ask_batch, generate, sampling_json
from observing import Counted, Metrics, engine_status
from slipstream_client import control
from slipstream_client.server.tritonserver import TritonServer

pytestmark = pytest.mark.server

BLOCK_SIZE = 16


def test_the_counters_of_the_continuous_engine_are_exact(server: TritonServer) -> None:
    with Counted(server, "continuous") as counted:
        first = ask(server, "continuous", PROMPTS[0], max_tokens=5, ignore_eos=True)
        second = ask(server, "continuous_unary", PROMPTS[1], max_tokens=9, ignore_eos=True)
        third = ask(server, "continuous", PROMPTS[2], max_tokens=9, stop_length=3, ignore_eos=True)
        with pytest.raises(Refused):
            ask(server, "continuous", PROMPTS[3], max_tokens=0)
    prompt_tokens = sum(answer.num_input_tokens for answer in (first, second, third))
    assert counted.added["prompt_tokens_total"] == prompt_tokens
    assert counted.added["generation_tokens_total"] == 5 + 9 + 3
    assert counted.finished == {"stop": 1, "length": 2, "cancelled": 0, "error": 0}
    assert counted.added["preemptions_total"] == 0
    # One after the other: a step for each output token, and the last token of an answer is never computed.
    assert counted.added["steps_total"] == 5 + 9 + 3
    assert counted.added["useful_tokens_total"] == prompt_tokens + (5 + 9 + 3) - 3
    assert counted.added["computed_tokens_total"] == counted.added["useful_tokens_total"]
    held = [
        answer.num_input_tokens + step for answer in (first, second, third) for step in range(answer.num_output_tokens)
    ]
    waste = sum(1 - tokens / (BLOCK_SIZE * math.ceil(tokens / BLOCK_SIZE)) for tokens in held)
    assert counted.added["kv_waste_steps_total"] == pytest.approx(waste)


def test_a_cancelled_request_counts_what_was_computed_of_it(server: TritonServer) -> None:
    with Counted(server, "continuous") as counted, GrpcStream(server) as stream:
        stream.send("continuous", PROMPTS[0], request_id="counted", max_tokens=400, ignore_eos=True)
        stream.receive()
        assert generate(server, "continuous", {"id": "counted", "cancel": True})[0] == 200
        with pytest.raises(Refused, match="Request was cancelled"):
            stream.collect()
    assert counted.finished == {"stop": 0, "length": 0, "cancelled": 1, "error": 0}
    assert counted.added["prompt_tokens_total"] == 3
    assert 1 <= counted.added["generation_tokens_total"] < 400
    assert counted.added["useful_tokens_total"] == 3 + counted.added["generation_tokens_total"] - 1


def test_a_lock_step_batch_counts_the_padding_that_it_computes(server: TritonServer) -> None:
    lengths = (2, 8, 5)
    with Counted(server, "static") as counted:
        answers = ask_batch(
            server, PROMPTS[:3], [sampling_json(max_tokens=length, ignore_eos=True) for length in lengths]
        )
    prompt_lengths = [answer.num_input_tokens for answer in answers]
    assert counted.added["prompt_tokens_total"] == sum(prompt_lengths)
    assert counted.added["generation_tokens_total"] == sum(lengths)
    assert counted.finished["length"] == 3
    assert counted.added["steps_total"] == max(lengths)
    # Every row is computed for as long as the longest, left-padded to the longest.
    assert counted.added["computed_tokens_total"] == 3 * (max(prompt_lengths) + max(lengths) - 1)
    assert counted.added["useful_tokens_total"] == sum(prompt_lengths) + sum(length - 1 for length in lengths)
    assert 0 < counted.added["kv_waste_steps_total"] < max(lengths)


@pytest.mark.parametrize("model", ["dynamic", "iterative"])
def test_one_request_alone_computes_the_same_with_every_batcher(server: TritonServer, model: str) -> None:
    with Counted(server, model) as counted:
        answer = ask(server, model, PROMPTS[1], max_tokens=6, ignore_eos=True)
    assert counted.added["prompt_tokens_total"] == answer.num_input_tokens
    assert counted.added["generation_tokens_total"] == counted.added["steps_total"] == 6
    assert counted.added["computed_tokens_total"] == counted.added["useful_tokens_total"] == answer.num_input_tokens + 5
    assert counted.finished == {"stop": 0, "length": 1, "cancelled": 0, "error": 0}


def test_every_sample_names_model_version_and_batcher(server: TritonServer) -> None:
    metrics = Metrics(server)
    for engine, batcher in {
        "continuous": "continuous",
        "static": "static",
        "dynamic": "dynamic",
        "iterative": "iterative",
    }.items():
        assert metrics.samples("slipstream_engine_up", model=engine, version="1", batcher=batcher) == [1.0]
        assert metrics.samples("slipstream_kv_blocks_total", model=engine) == [2184.0]


def test_two_models_of_one_engine_share_its_process_and_publish_its_metrics_once(server: TritonServer) -> None:
    engines = ["continuous", "dynamic", "iterative", "static"]
    assert [path.stem for path in control.list_engines(server.runtime_dir)] == engines
    assert [engine_status(server, engine)["doors"] for engine in engines] == [2, 1, 1, 1]
    metrics = Metrics(server)
    for name in ("requests_running", "kv_blocks_total", "engine_up", "prompt_tokens_total", "steps_total"):
        assert [len(metrics.samples(f"slipstream_{name}", model=engine)) for engine in engines] == [1, 1, 1, 1]
        assert metrics.samples(f"slipstream_{name}", model="continuous_unary") == []
