"""What all tests share: hypothesis without chance and without a clock, and a model small enough to load in no time."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# As in an engine process (slipstream.engine.link.engine_environment); read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A shell starts its background commands with Ctrl-C ignored, and children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "slipstream",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("slipstream")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Where two workers share the tests, one has those of the servers that are started once, the other the modules."""
    item.add_marker(pytest.mark.xdist_group("server" if item.path.parent.name == "server" else item.path.stem))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a randomly initialised Llama with grouped KV heads."""
    from tiny_model import save_tiny_llama

    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))
