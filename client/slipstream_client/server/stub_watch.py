"""Load a model again when the process that ran it has died, which tritonserver neither mends nor reports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from slipstream_client.server.tritonserver import ServerError, TritonServer

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


class StubWatch:
    """Watches the models of one running server. Loading goes on in a thread, one model after the other.

    A model that cannot be loaded is tried again after a pause, twice as long each time up to half a minute.

    Args:
        server: the server, which has started.
        say: called, from any thread, with one line about what happened.
    """

    def __init__(self, server: TritonServer, say: Callable[[str], None]) -> None:
        self._server = server
        self._say = say
        self._worker: threading.Thread | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._next_try = 0.0  # in terms of time.monotonic()

    def look(self) -> None:
        """Look once, and start to load what died; returns at once."""
        if (self._worker is not None and self._worker.is_alive()) or time.monotonic() < self._next_try:
            return
        dead = self._server.dead_models()
        if dead:
            self._worker = threading.Thread(target=self._reload, args=(dead,), name="reload", daemon=True)
            self._worker.start()

    def _reload(self, models: list[str]) -> None:
        for model in models:
            self._say(f"{model}: its process ended; loading it again")
            try:
                self._server.reload(model)
            except ServerError as error:
                if not self._server.running:
                    return
                self._say(f"{error}; next try in {self._pause_s:g} s")
                self._next_try = time.monotonic() + self._pause_s
                self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
                return
            self._pause_s = _FIRST_PAUSE_S
            self._say(f"{model}: ready again")
