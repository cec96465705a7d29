"""A server that dies takes its engine with it, even where a door of it cannot end by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from deadline import wait_until
from tiny_model import make_config

_DOOR = """
import os, signal, sys
from pathlib import Path
from slipstream.config import EngineConfig
from slipstream.engine.link import EngineLink

config = EngineConfig(**eval(sys.argv[1]))
link = EngineLink(config, Path(sys.argv[2]), lambda update: None, print, server_pid=int(sys.argv[3]))
print(link.start().pid, flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_an_engine_and_a_stuck_door_end_after_their_server(tiny_llama: Path) -> None:
    """The door is stopped, as a stub is whose interpreter waits for an answer of the dead server."""
    config = make_config(model=str(tiny_llama), grace_seconds=0, num_blocks=64)
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
    with tempfile.TemporaryDirectory(prefix="slipstream-test-") as directory:
        server = subprocess.Popen(["sleep", "600"])
        door = subprocess.Popen(
            [sys.executable, "-c", _DOOR, repr(fields), directory, str(server.pid)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert door.stdout is not None
            engine = psutil.Process(int(door.stdout.readline()))
            wait_until(lambda: psutil.Process(door.pid).status() == psutil.STATUS_STOPPED, "the door is stuck")
            assert engine.is_running()
            server.kill()
            server.wait()
            wait_until(lambda: door.poll() == -signal.SIGKILL, "the engine ends the door")
            wait_until(lambda: not psutil.pid_exists(engine.pid) or engine.status() == "zombie", "the engine ends")
        finally:
            for process in (server, door):
                if process.poll() is None:
                    os.kill(process.pid, signal.SIGKILL)
                process.wait()
