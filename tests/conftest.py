"""What all tests share: hypothesis without chance and without a clock, and a model small enough to load in no time."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

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


class ServerOrModule(LoadScopeScheduling):
    """Gives one worker all tests of the servers that are started once, and the other the modules one by one."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        return "tests/server" if module.startswith("tests/server/") else module


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ServerOrModule:
    return ServerOrModule(config, log)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a randomly initialised Llama with grouped KV heads."""
    from tiny_model import save_tiny_llama

    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))
