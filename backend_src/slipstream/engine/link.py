"""A door's link to its engine: starts the engine if none is alive, shares it if one is, and notices its death.

Liveness is the end-of-file of the control socket: it comes however the engine dies. All traffic is done by one thread;
the door's own threads only append to a queue.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from slipstream.config import EngineConfig
from slipstream.engine.control import receive_message, send_message
from slipstream.engine.messages import Cancel, Command, EngineInfo, Leave, NewRequest, Submit, Update
from slipstream.engine.request import FINISH_STOP
from slipstream.errors import ConfigError, SlipstreamError, Unavailable

log = logging.getLogger(__name__)

_News = TypeVar("_News")
_FIRST_BACKOFF_S = 0.2
# Deaths after shorter lives than this count as in a row; after so many no other engine is started.
_SHORT_LIFE_S = 60.0
_MOST_DEATHS = 5
_START_TIMEOUT_S = 30.0


class EngineFailed(SlipstreamError):
    """The engine could not be started, or refused this door."""


class EngineLink:
    """Connects a door to the engine of one server that has this configuration.

    `on_update` and `on_down` are called from the link's thread: with each step's news, and with the reason when the
    engine is gone; whatever was in flight then will not be answered any more. `server_pid` is the process whose end is
    to end the engine too, whatever its doors do.
    """

    def __init__(
        self,
        config: EngineConfig,
        directory: Path,
        on_update: Callable[[Update], None],
        on_down: Callable[[str], None],
        server_pid: int | None = None,
    ) -> None:
        self._config = config
        self._server_pid = server_pid
        self._directory = directory
        self._on_update = on_update
        self._on_down = on_down
        self._queue: collections.deque[Command] = collections.deque()
        self._wake_reader, self._wake_writer = os.pipe()
        self._closing = False
        self._down_reason: str | None = "the engine has not started yet"
        self._thread = threading.Thread(target=self._run, name="engine-link", daemon=True)
        self._session: _Session | None = None
        self.info: EngineInfo | None = None

    def start(self) -> EngineInfo:
        """Connect, starting the engine if need be; returns when its model is loaded.

        Raises:
            EngineFailed: the engine did not start, or runs with another configuration.
        """
        self._session = self._connect()
        self.info = self._session.info
        self._down_reason = None
        self._thread.start()
        return self.info

    @property
    def up(self) -> bool:
        return self._down_reason is None

    def submit(self, requests: Sequence[NewRequest], advance: Sequence[int] = ()) -> None:
        """Hand over new requests and, to an iterative engine, the ids that are to get one more token.

        Raises:
            Unavailable: the engine is down; the text says why.
        """
        self._put(Submit(list(requests), list(advance)))

    def cancel(self, ids: Sequence[int]) -> None:
        """End requests; with the engine down they have ended already."""
        with contextlib.suppress(Unavailable):
            self._put(Cancel(list(ids)))

    def finish(self, ids: Sequence[int]) -> None:
        """End requests that have brought all that is wanted; with the engine down they have ended already."""
        with contextlib.suppress(Unavailable):
            self._put(Cancel(list(ids), FINISH_STOP))

    def close(self) -> None:
        """Leave the engine; it ends by itself when its last door has left. Closing twice is closing once."""
        if self._closing:
            return
        self._closing = True
        os.write(self._wake_writer, b".")
        # Until the engine's last update; the time is for one that hangs.
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        self._down_reason = "the door has left it"
        if not self._thread.is_alive():
            os.close(self._wake_writer)
            os.close(self._wake_reader)

    def _put(self, command: Command) -> None:
        reason = self._down_reason
        if reason is not None:
            raise Unavailable(f"the engine is not up: {reason}")
        self._queue.append(command)
        os.write(self._wake_writer, b".")

    def _connect(self) -> _Session:
        return _Session(self._config, self._directory, self._server_pid)

    def _run(self) -> None:
        """Serve, and start the engine again after each death, later each time; where it keeps dying, leave it."""
        deaths, name = 0, self._config.name
        while not self._closing and deaths < _MOST_DEATHS:
            start = time.monotonic()
            try:
                if self._session is None:
                    self._session = self._connect()
                    self._queue.clear()
                    self._down_reason = None
                self._serve(self._session)
                self._session.close()
                self._session = None
                reason = f"engine {name!r} died"
            except Exception as error:
                reason = str(error)
                log.error("engine %s is not back: %s", name, error)
            if self._closing:
                return
            deaths = deaths + 1 if time.monotonic() - start < _SHORT_LIFE_S else 1
            if deaths == _MOST_DEATHS:
                reason += f" for the {deaths}th time in a row and stays down; load its models again when it is mended"
                reason += f": {_log_tail(self._config, self._directory)}"
            else:
                reason += " and is being started again"
            self._down_reason = reason
            self._tell(self._on_down, reason)
            time.sleep(_FIRST_BACKOFF_S * (2 ** (deaths - 1) - 1))

    def _serve(self, session: _Session) -> None:
        """Carry commands and updates until the engine is gone or the link is closed."""
        poller = zmq.Poller()
        poller.register(session.messages, zmq.POLLIN)
        poller.register(session.control.fileno(), zmq.POLLIN)
        poller.register(self._wake_reader, zmq.POLLIN)
        decoder = msgspec.msgpack.Decoder(Update)
        while True:
            ready = dict(poller.poll())
            if session.messages in ready:
                update = decoder.decode(session.messages.recv())
                self._tell(self._on_update, update)
                if update.last:
                    return
            elif session.control.fileno() in ready:
                # Nothing is ever said here after the greeting: this is the engine's end-of-file.
                return
            if self._wake_reader in ready:
                os.read(self._wake_reader, 4096)
                while self._queue:
                    session.messages.send(msgspec.msgpack.encode(self._queue.popleft()))
                if self._closing:
                    session.messages.send(msgspec.msgpack.encode(Leave()))

    def _tell(self, door: Callable[[_News], None], news: _News) -> None:
        """Hand news over; a door that fails over some of it still gets the next."""
        try:
            door(news)
        except Exception:
            log.exception("the door of engine %s failed over its news", self._config.name)


class _Session:
    """One connection to one living engine."""

    def __init__(self, config: EngineConfig, directory: Path, server_pid: int | None) -> None:
        identity = secrets.token_bytes(8)
        greeting = {
            "type": "door",
            "identity": identity.hex(),
            "pid": os.getpid(),
            "server_pid": server_pid,
            "fingerprint": config.fingerprint,
            "config": dataclasses.asdict(config),
        }
        self.control, answer = _greet(config, directory, greeting)
        if answer["type"] != "ready":
            self.control.close()
            raise EngineFailed(str(answer["reason"]))
        self.info = msgspec.convert(answer["info"], EngineInfo)
        self.messages: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.messages.setsockopt(zmq.ROUTING_ID, identity)
        self.messages.setsockopt(zmq.LINGER, 0)
        self.messages.set_hwm(0)
        self.messages.connect(f"ipc://{directory / config.name}.zmq")
        # Makes the door known to the engine's socket, which cannot address it before.
        self.messages.send(msgspec.msgpack.encode(Submit([])))

    def close(self) -> None:
        self.messages.close()
        self.control.close()


def _greet(config: EngineConfig, directory: Path, greeting: dict[str, Any]) -> tuple[socket.socket, dict[str, Any]]:
    """A control connection to an engine that has answered the greeting, and its answer.

    An engine that was there may be on its way out: its grace is over, or it was killed and the kernel has hung up on
    its doors before it ends the listening. Nothing tells it from one that lives, so a door that loses it tries again.
    """
    while True:
        connection, ours = _connect_or_start(config, directory)
        try:
            send_message(connection, greeting)
            return connection, receive_message(connection)
        except OSError as error:
            connection.close()
            if ours:
                raise EngineFailed(
                    f"engine {config.name!r} died while it was starting: {_log_tail(config, directory)}"
                ) from error


def _connect_or_start(config: EngineConfig, directory: Path) -> tuple[socket.socket, bool]:
    """A control connection to the living engine of that name, or to a new one, and whether it is new.

    One door at a time decides which.
    """
    path = directory / f"{config.name}.sock"
    with (directory / f"{config.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = _connect(path)
        if connection is not None:
            return connection, False
        process = _start(config, directory)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            connection = _connect(path)
            if connection is not None:
                return connection, True
            if process.poll() is not None:
                break
            time.sleep(0.02)
        process.kill()
        raise EngineFailed(f"engine {config.name!r} did not start: {_log_tail(config, directory)}")


def _connect(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    return connection


def _start(config: EngineConfig, directory: Path) -> subprocess.Popen[bytes]:
    """Start the engine in a fresh interpreter and a session of its own."""
    description = (directory / f"{config.name}.json").absolute()
    # It starts in the root folder, so that no file here shadows a module, and then comes back for relative paths.
    words = {"config": dataclasses.asdict(config), "directory": str(directory), "folder": os.getcwd()}
    description.write_text(json.dumps(words))
    with (directory / f"{config.name}.log").open("ab") as output:
        process = subprocess.Popen(
            [_interpreter(), "-m", "slipstream.engine.process", str(description)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            env=engine_environment(),
            start_new_session=True,
        )
    # Reaped by a thread, so that a dead engine is not kept as a zombie of the door that happened to start it.
    threading.Thread(target=process.wait, name="reap-engine", daemon=True).start()
    return process


def engine_environment() -> dict[str, str]:
    """The engine's environment: the door's, the package's own folder, and matmul threads that sleep while they wait.

    OpenMP's default is to spin. On cores that doors, server and clients share, a spinning thread keeps from running
    what it waits for: with four other busy processes on two cores a decode step took twenty times as long.
    """
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _interpreter() -> str:
    """A Python that runs this version's code. Inside Triton's stub `sys.executable` is only the first python3 of PATH.

    Raises:
        ConfigError: none of the candidates is this Python version.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    candidates = [
        Path(sys.prefix) / "bin" / f"python{version}",
        Path(sys.prefix) / "bin" / "python3",
        Path(sys.executable or "/nonexistent"),
        Path(sysconfig.get_config_var("BINDIR") or "/nonexistent") / f"python{version}",
    ]
    probe = "import sys; print('%d.%d' % sys.version_info[:2])"
    for candidate in candidates:
        if not candidate.exists():
            continue
        result = subprocess.run([candidate, "-c", probe], capture_output=True, text=True, timeout=30, check=False)
        if result.stdout.strip() == version:
            return str(candidate)
    raise ConfigError(f"no Python {version} interpreter found for the engine; tried {', '.join(map(str, candidates))}")


def _log_tail(config: EngineConfig, directory: Path) -> str:
    """The last line of the engine's log, where its error stands."""
    path = directory / f"{config.name}.log"
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return f"{lines[-1] if lines else 'no output'} (log: {path})"
