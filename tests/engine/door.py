"""A door without Triton: submits over a link, and keeps what the engine says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deadline import PATIENCE_S
from slipstream.config import EngineConfig
from slipstream.engine.link import EngineLink
from slipstream.engine.messages import EngineStats, NewRequest, Output, Update
from slipstream.engine.request import SamplingParams
from slipstream_client import control


class Door:
    """What a Triton model does with its link."""

    def __init__(self, config: EngineConfig, directory: Path) -> None:
        self.outputs: dict[int, list[Output]] = {}
        self.stats: list[EngineStats] = []
        self.published: list[EngineStats] = []
        self.downs: list[str] = []
        self.directory = directory
        self._name = config.name
        self._news = threading.Condition()
        self.link = EngineLink(config, directory, self.take, self._take_down)
        self.info = self.link.start()

    def take(self, update: Update) -> None:
        """Keep what one step has brought."""
        with self._news:
            for output in update.outputs:
                self.outputs.setdefault(output.id, []).append(output)
            if update.stats is not None:
                self.stats.append(update.stats)
            if update.published is not None:
                self.published.append(update.published)
            self._news.notify_all()

    def _take_down(self, reason: str) -> None:
        with self._news:
            self.downs.append(reason)
            self._news.notify_all()

    def ask(self, id_: int, prompt_ids: list[int], *, stream: bool = True, **sampling: Any) -> None:
        """Submit one request, greedy and of eight tokens unless told otherwise."""
        self.link.submit([new_request(id_, prompt_ids, stream=stream, **sampling)])

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Return once the news fulfil a condition."""
        with self._news:
            assert self._news.wait_for(condition, PATIENCE_S), "no such news from the engine"

    def end_of(self, id_: int) -> Output:
        """The last output of a request, once it has come."""
        self.wait_for(lambda: self.outputs.get(id_) and self.outputs[id_][-1].finish_reason is not None)
        return self.outputs[id_][-1]

    def answer(self, id_: int) -> list[int]:
        """All tokens of a request that ends well."""
        last = self.end_of(id_)
        assert last.error is None, last.error
        return self.tokens(id_)

    def tokens(self, id_: int) -> list[int]:
        """The tokens of a request so far."""
        return [token_id for output in self.outputs.get(id_, []) for token_id in output.token_ids]

    def tell(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message to the engine's control socket, as a tool does, and return the answer."""
        return control.request(self.directory / f"{self._name}.sock", message, timeout_s=PATIENCE_S)

    def status(self) -> dict[str, Any]:
        """The engine's own words on how it is."""
        return self.tell({"type": "status"})


def new_request(
    id_: int, prompt_ids: list[int], *, stream: bool = True, timeout_s: float | None = None, **sampling: Any
) -> NewRequest:
    """A request that arrives now."""
    parameters = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling})
    return NewRequest(id_, prompt_ids, parameters, time.monotonic(), stream, timeout_s=timeout_s)
