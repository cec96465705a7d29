"""A server whose engines may be killed and whose models may be unloaded, and others that a test starts for itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from helpers import ENGINES, golden_answers, make_server
from observing import require_running, wait_until_at_rest
from slipstream_client.server.tritonserver import TritonServer
from spare import SPARE_QUEUE, SPARE_RESPONSE_BYTES, SPARE_SEATS, Spare


@pytest.fixture(scope="session")
def shared_spare() -> Iterator[Spare]:
    models = ("continuous", "dynamic", "iterative")
    server = make_server(
        *models,
        SLIPSTREAM_MAX_NUM_SEQS=str(SPARE_SEATS),
        SLIPSTREAM_MAX_QUEUED_REQUESTS=str(SPARE_QUEUE),
        SLIPSTREAM_KV_CACHE_BYTES=str(64 << 20),
        SLIPSTREAM_MAX_RESPONSE_BYTES=str(SPARE_RESPONSE_BYTES),
        SLIPSTREAM_GRACE_SECONDS="1",
    )
    start = time.monotonic()
    server.start()
    yield Spare(server, time.monotonic() - start)
    server.kill()


@pytest.fixture
def spare(shared_spare: Spare) -> Iterator[Spare]:
    """The server to be broken; every test leaves it whole again."""
    require_running(shared_spare.server)
    yield shared_spare
    require_running(shared_spare.server)
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
def golden(shared_spare: Spare) -> dict[str, list[int]]:
    """Greedy output ids of every prompt, from before anything was broken."""
    return golden_answers(shared_spare.server)
