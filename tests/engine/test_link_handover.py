"""A door that meets an engine on its way out starts one of its own instead of failing."""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deadline import PATIENCE_S
from door import Door
from slipstream.engine.control import receive_message
from tiny_model import make_config, make_prompts


@pytest.fixture
def directory() -> Iterator[Path]:
    """Private, with a path short enough for a Unix socket."""
    folder = Path(tempfile.mkdtemp(prefix="slipstream-test-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("hears_the_door", [True, False])
def test_an_engine_that_ends_before_it_greets_is_replaced(
    directory: Path, tiny_llama: Path, hears_the_door: bool
) -> None:
    """Its grace ran out, or it was killed, just when the door had connected: in its backlog or already accepted."""
    path = directory / "tiny.sock"
    leaving = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    leaving.bind(str(path))
    leaving.listen(1)

    def end() -> None:
        peer, _ = leaving.accept()
        if hears_the_door:
            receive_message(peer)
        leaving.close()
        path.unlink()
        peer.close()

    thread = threading.Thread(target=end)
    thread.start()
    door = Door(make_config(model=str(tiny_llama), grace_seconds=0, num_blocks=64), directory)
    thread.join(timeout=PATIENCE_S)
    door.ask(0, make_prompts(1)[0], max_tokens=3)
    assert len(door.answer(0)) == 3
    door.link.close()
