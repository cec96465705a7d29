"""An engine's process in a thread of the tests, with a runner whose steps they let go one by one."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deadline import PATIENCE_S
from door import Door
from scripted import ScriptedRunner
from slipstream.config import EngineConfig
from slipstream.engine.batch import Batch, StepOutput
from slipstream.engine.engine import Engine
from slipstream.engine.process import EngineProcess


class GatedRunner(ScriptedRunner):
    """Computes a step only once it is let; `during` is what the engine's thread does within a step, by its number."""

    def __init__(self, num_blocks: int = 64, **fields: Any) -> None:
        super().__init__(num_blocks, **fields)
        self.during: dict[int, Callable[[], object]] = {}
        self._permits = threading.Semaphore(0)
        self._begun = threading.Semaphore(0)

    def run(self, batch: Batch) -> StepOutput:
        self._begun.release()
        assert self._permits.acquire(timeout=PATIENCE_S), "a step was never let"
        self.during.get(len(self.batches), lambda: None)()
        return super().run(batch)

    def wait_until_a_step_has_begun(self) -> None:
        assert self._begun.acquire(timeout=PATIENCE_S), "no step has begun"

    def let(self, steps: int = 5_000) -> None:
        self._permits.release(steps)


class ScriptedProcess(EngineProcess):
    """The engine's process without a model: `load` makes its runner."""

    def __init__(self, config: EngineConfig, directory: Path, load: Callable[[], ScriptedRunner]) -> None:
        self._make_runner = load
        super().__init__(config, directory)

    def _load(self) -> None:
        try:
            self._engine = Engine(self._config, self._make_runner())
        except Exception as error:
            self._failure = str(error)
        os.write(self._wake_writer, b".")


class Server:
    """A process that runs in a thread, and its doors."""

    def __init__(self, load: Callable[[], ScriptedRunner], config: EngineConfig) -> None:
        self.config = config
        self.directory = Path(tempfile.mkdtemp(prefix="slipstream-test-"))
        self._doors: list[Door] = []
        self.process = ScriptedProcess(config, self.directory, load)
        self.thread = threading.Thread(target=self.process.run, daemon=True)
        self.thread.start()

    def open(self) -> Door:
        self._doors.append(Door(self.config, self.directory))
        return self._doors[-1]

    def wait_for_command(self) -> None:
        """Return once a door's message has arrived; for the engine's own thread, whose socket it is."""
        assert self.process._commands.poll(PATIENCE_S * 1000), "no command has come"

    def close(self) -> None:
        for door in self._doors:
            door.link.close()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), "the engine did not end after its last door"
        shutil.rmtree(self.directory)
