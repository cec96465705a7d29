"""Real servers for the tests: one with all models for whoever leaves it as it was, a smaller one to be broken."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import Tokenizer

from helpers import ENGINES, NUM_GOLDEN, PROMPTS, SPARE_QUEUE, SPARE_SEATS, Spare, ask
from observing import engine_pids, is_alive, wait_until_at_rest
from slipstream.models.store import resolve
from slipstream_client.server.tritonserver import TritonServer

# Several engines share few cores here, and a second thread only waits for cores that another engine has.
ENVIRONMENT = {"SLIPSTREAM_THREADS": "1"}


def make_server(*models: str, **environment: str) -> TritonServer:
    """A server on free ports that was not started."""
    return TritonServer(
        models or None, http_port=0, grpc_port=0, metrics_port=0, environment={**ENVIRONMENT, **environment}
    )


@pytest.fixture(scope="session")
def shared_server() -> Iterator[TritonServer]:
    server = make_server()
    server.start()
    yield server
    server.kill()


@pytest.fixture
def server(shared_server: TritonServer) -> Iterator[TritonServer]:
    """The server with all five models; every test leaves the same processes behind, and nothing that runs."""
    pids = engine_pids(shared_server)
    yield shared_server
    wait_until_at_rest(shared_server, pids)
    assert engine_pids(shared_server) == pids
    assert is_alive(shared_server.pid)


@pytest.fixture(scope="session")
def shared_spare() -> Iterator[Spare]:
    models = ("continuous", "dynamic", "iterative")
    server = make_server(
        *models,
        SLIPSTREAM_MAX_NUM_SEQS=str(SPARE_SEATS),
        SLIPSTREAM_MAX_QUEUED_REQUESTS=str(SPARE_QUEUE),
        SLIPSTREAM_KV_CACHE_BYTES=str(128 << 20),
        SLIPSTREAM_GRACE_SECONDS="1",
    )
    start = time.monotonic()
    server.start()
    yield Spare(server, time.monotonic() - start)
    server.kill()


@pytest.fixture
def spare(shared_spare: Spare) -> Iterator[Spare]:
    """The server to be broken; every test leaves it whole again."""
    yield shared_spare
    wait_until_at_rest(shared_spare.server, {ENGINES[model] for model in shared_spare.server.models})


@pytest.fixture
def start_server() -> Iterator[Callable[..., TritonServer]]:
    """Start servers that a test kills; whatever is left of them is killed when it ends."""
    made: list[TritonServer] = []

    def start(*models: str, **environment: Any) -> TritonServer:
        made.append(make_server(*models, **environment))
        made[-1].start()
        return made[-1]

    yield start
    for server in made:
        server.kill()


@pytest.fixture(scope="session")
def golden(shared_server: TritonServer) -> dict[str, list[int]]:
    """Greedy output ids of every prompt from the continuous engine."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = pool.map(lambda prompt: ask(shared_server, "continuous", prompt, max_tokens=NUM_GOLDEN), PROMPTS)
        return {prompt: answer.ids for prompt, answer in zip(PROMPTS, answers, strict=True)}


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The model's tokenizer, as the reference of what a text is."""
    return Tokenizer.from_file(str(resolve("smollm2-135m") / "tokenizer.json"))
