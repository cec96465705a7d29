"""An engine's control socket without an engine: it answers every message with what it is given."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


class FakeEngine:
    """Listens in `runtime_dir` under `name` until the test ends; `answer` is called with each message."""

    def __init__(self, runtime_dir: Path, name: str, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(runtime_dir / f"{name}.sock"))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            # Who asks may have left.
            with connection, connection.makefile("rb") as stream, contextlib.suppress(BrokenPipeError):
                (length,) = struct.unpack("<I", stream.read(4))
                payload = json.dumps(self._answer(json.loads(stream.read(length)))).encode()
                connection.sendall(struct.pack("<I", len(payload)) + payload)
