"""The model `admin` on the real server: what it tells adds up with what the server counts, and it changes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from helpers import PROMPTS, ask, ask_batch, sampling_json
from observing import Counted
from slipstream_client.admin import AdminClient
from slipstream_client.server.tritonserver import TritonServer
from slipstream_client.tensors import RequestFailed

pytestmark = pytest.mark.server

_ROWS = ("prefill_rows", "decode_rows", "recomputed_rows", "prompt_padding_rows", "finished_rows")


@pytest.fixture
def admin(server: TritonServer) -> Iterator[AdminClient]:
    with AdminClient(server.grpc_url) as client:
        yield client


@pytest.mark.parametrize("batcher", ["continuous", "dynamic", "iterative"])
def test_the_records_of_the_steps_add_up_to_the_counters(
    server: TritonServer, admin: AdminClient, batcher: str
) -> None:
    before = admin.status(batcher)["steps"]
    with Counted(server, batcher) as counted, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: ask(server, batcher, PROMPTS[n], max_tokens=4 + n, ignore_eos=True), range(4)))
    records = list(admin.records(batcher, before))

    def total(*names: str) -> int:
        return sum(record[name] for record in records for name in names)

    assert [record["index"] for record in records] == list(range(before, before + len(records)))
    assert len(records) == counted.added["steps_total"]
    assert total(*_ROWS) == counted.added["computed_tokens_total"]
    assert total("prefill_rows", "decode_rows") == counted.added["useful_tokens_total"]
    assert total("sampled_rows") == counted.added["generation_tokens_total"] == 4 + 5 + 6 + 7
    assert records[-1]["left"] == 0
    assert all(record["left"] for record in records[:-1] if record["running"] > 1)


@pytest.mark.parametrize("batcher", ["continuous", "dynamic", "static", "iterative"])
def test_an_answer_tells_when_it_arrived_on_the_clock_that_the_engine_is_asked_for(
    server: TritonServer, admin: AdminClient, batcher: str
) -> None:
    offset_s = admin.clock_offset_s(batcher)
    sent = time.perf_counter()
    stats = ask(server, batcher, PROMPTS[0], max_tokens=3, ignore_eos=True).stats
    ended = time.perf_counter()
    arrival = stats["arrival_s"] - offset_s
    # Cristian's bound: half of an exchange, which takes milliseconds.
    assert sent - 0.05 < arrival < ended
    assert arrival + (stats["queue_ms"] + stats["inference_ms"]) / 1000 < ended + 0.05
    assert ("held_ms" in stats) == (batcher in ("dynamic", "static"))


def test_an_answer_that_was_held_for_its_batch_says_how_long(server: TritonServer) -> None:
    lengths = (2, 12)
    samplings = [sampling_json(max_tokens=length, ignore_eos=True) for length in lengths]
    short, long = ask_batch(server, PROMPTS[:2], samplings)
    assert long.stats["held_ms"] == 0
    # Both began in the same step, and the batch ended with the longer one.
    assert short.stats["held_ms"] == pytest.approx(long.stats["inference_ms"] - short.stats["inference_ms"], abs=0.01)
    assert short.stats["held_ms"] > 0


def test_all_engines_are_named(admin: AdminClient) -> None:
    assert admin.engines() == ["continuous", "dynamic", "iterative", "static"]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (
            {"type": "status", "engine": "../other"},
            "engine is '../other'; allowed are continuous, dynamic",
        ),
        ({"type": "status"}, "engine is None"),
        ({"type": "drain", "engine": "continuous"}, "whose type is engines, status, records"),
        ({"type": "status", "engine": "static", "since": 1}, "unknown field 'since'"),
        ({"type": "records", "engine": "static", "since": "x"}, "not a message"),
    ],
)
def test_what_admin_does_not_take_is_refused_and_nothing_else_is_lost(
    server: TritonServer, admin: AdminClient, command: dict[str, Any], told: str
) -> None:
    with pytest.raises(RequestFailed) as refused:
        admin._ask(**command)
    assert refused.value.code == "INVALID_ARGUMENT"
    assert told in refused.value.text
    assert ask(server, "continuous", PROMPTS[0], max_tokens=2, ignore_eos=True).num_output_tokens == 2
