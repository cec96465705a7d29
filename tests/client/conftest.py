from __future__ import annotations

from collections.abc import Iterator

import pytest

from fake_triton import FakeTriton


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    """A scripted server on a free port."""
    with FakeTriton() as server:
        yield server
