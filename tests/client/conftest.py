from __future__ import annotations

from collections.abc import Iterator

import pytest

from fake_triton import FakeTriton
from scripted_http import ScriptedHttp


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    """A scripted server on a free port."""
    with FakeTriton() as server:
        yield server


@pytest.fixture
def http() -> Iterator[ScriptedHttp]:
    """The same over HTTP."""
    with ScriptedHttp() as server:
        yield server
