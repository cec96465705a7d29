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


# What the tests of each of these share takes long to start, and they take longest.
_ONE_SERVER_EACH = ("tests/server", "tests/lifecycle")


def _work_unit(nodeid: str) -> str:
    """What one worker does as a whole: the tests of a server that is started once, else a module."""
    module = nodeid.partition("::")[0]
    folder = module.rpartition("/")[0]
    return folder if folder in _ONE_SERVER_EACH else module


class ServerOrModule(LoadScopeScheduling):
    """Gives out work units in the order of the tests."""

    def _split_scope(self, nodeid: str) -> str:
        return _work_unit(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ServerOrModule:
    config.option.loadscopereorder = False
    return ServerOrModule(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _work_unit(item.nodeid) not in _ONE_SERVER_EACH)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a randomly initialised Llama with grouped KV heads."""
    from tiny_model import save_tiny_llama

    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))
