"""The server that most tests ask: it has all models, and every test leaves it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer

from helpers import golden_answers, make_server
from observing import engine_pids, require_running, wait_until_at_rest
from slipstream.models.store import resolve
from slipstream_client.server.tritonserver import TritonServer


@pytest.fixture(scope="session")
def shared_server() -> Iterator[TritonServer]:
    server = make_server()
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def first_pids(shared_server: TritonServer) -> dict[str, int]:
    return engine_pids(shared_server)


@pytest.fixture
def server(shared_server: TritonServer, first_pids: dict[str, int]) -> Iterator[TritonServer]:
    """The server with all five models; every test leaves the same processes behind, and nothing that runs."""
    require_running(shared_server)
    yield shared_server
    require_running(shared_server)
    wait_until_at_rest(shared_server, first_pids)
    assert engine_pids(shared_server) == first_pids


@pytest.fixture(scope="session")
def golden(shared_server: TritonServer) -> dict[str, list[int]]:
    """Greedy output ids of every prompt."""
    return golden_answers(shared_server)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The model's tokenizer, as the reference of what a text is."""
    return Tokenizer.from_file(str(resolve("smollm2-135m") / "tokenizer.json"))
