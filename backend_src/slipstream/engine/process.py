"""The engine's process: `python -m slipstream.engine.process NAME.json`, started by the first door that needs it.

One thread polls the doors' commands, the control socket and, while there is work, computes step after step. It never
waits for a door: answers are queued to zmq's own thread.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import zmq

from slipstream.config import EngineConfig
from slipstream.engine.control import Connection, ControlSocket
from slipstream.engine.messages import Cancel, Command, EngineInfo, EngineStats, Leave, NewRequest, Output, Update
from slipstream.engine.request import (
    CANCELLED,
    FINISH_CANCELLED,
    FINISH_ERROR,
    INTERNAL,
    INVALID,
    UNAVAILABLE,
    Request,
)
from slipstream.engine.server_watch import ServerWatch, kill_doors
from slipstream.errors import InvalidRequest, Unavailable

log = logging.getLogger("slipstream.engine")

# How long an engine that is still loading waits for the door that started it.
_FIRST_DOOR_SECONDS = 120.0
_STATS_INTERVAL_S = 0.5
_OUT_OF_TIME = "the server is shutting down and the request did not end in time"


class EngineProcess:
    """Serves one engine to the doors of one server."""

    def __init__(self, config: EngineConfig, directory: Path) -> None:
        self._config = config
        self._directory = directory
        self._control = ControlSocket(directory / f"{config.name}.sock")
        self._commands: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._commands.set_hwm(0)
        self._commands.bind(f"ipc://{directory / config.name}.zmq")
        self._poller = zmq.Poller()
        self._poller.register(self._commands, zmq.POLLIN)
        self._poller.register(self._control.listener, zmq.POLLIN)
        self._wake_reader, self._wake_writer = os.pipe()
        self._poller.register(self._wake_reader, zmq.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._encoder = msgspec.msgpack.Encoder()
        self._engine: Any = None
        self._failure: str | None = None
        self._greetings: list[Connection] = []  # doors that wait for the model to be loaded
        self._doors: dict[bytes, Connection] = {}  # by identity, the first leads
        self._alone_since = time.monotonic()
        self._had_door = False
        self._server = ServerWatch()
        self._stats_due = 0.0
        self._last_leader: bytes | None = None
        self._last_stats: EngineStats | None = None  # as that leader has them
        self._drain_until: float | None = None
        self._drainers: list[Connection] = []
        self._drain_counts = {"finished": 0, "aborted": 0}

    def run(self) -> None:
        """Load the model, then serve until the last door has been gone for the grace time."""
        threading.Thread(target=self._load, name="load", daemon=True).start()
        while not self._deserted():
            ready = dict(self._poller.poll(self._poll_timeout_ms()))
            if self._wake_reader in ready:
                os.read(self._wake_reader, 64)
                self._loaded()
            if self._control.listener.fileno() in ready:
                self._accept()
            for descriptor in [fd for fd in ready if fd in self._control.connections]:
                self._converse(self._control.connections[descriptor])
            if self._server.descriptor in ready:
                self._poller.unregister(self._server.descriptor)
                self._server.note_gone()
            if self._commands in ready:
                self._take_commands()
            if self._engine is not None and self._engine.has_work:
                self._report(self._engine.step())
            if self._drain_until is not None:
                self._drain()
        # The control socket goes last: the next engine starts once nobody listens there, and has files of these names.
        self._commands.close(linger=0)
        leftovers = [".zmq", ".json"] if self._failure else [".zmq", ".json", ".log"]
        for suffix in leftovers:
            (self._directory / f"{self._config.name}{suffix}").unlink(missing_ok=True)
        self._control.close()

    # --- loading

    def _load(self) -> None:
        try:
            from slipstream.models.loading import load_runner

            runner = load_runner(self._config)
            from slipstream.engine.engine import Engine

            self._engine = Engine(self._config, runner)
        except Exception as error:
            log.exception("the engine could not be loaded")
            self._failure = f"{error}" if str(error) else type(error).__name__
        os.write(self._wake_writer, b".")

    def _loaded(self) -> None:
        for connection in self._greetings:
            self._greet(connection)
        self._greetings.clear()

    @property
    def _state(self) -> str:
        if self._failure is not None:
            return "failed"
        if self._engine is None:
            return "loading"
        return "ready" if self._drain_until is None else "draining"

    # --- time

    def _watch_server(self, pid: int) -> None:
        self._server.watch(pid)
        if self._server.descriptor is not None:
            self._poller.register(self._server.descriptor, zmq.POLLIN)

    def _deserted(self) -> bool:
        if self._server.gone_for(self._config.grace_seconds):
            kill_doors(door.pid for door in self._doors.values() if door.pid is not None)
            return True
        if self._failure is not None and not self._greetings:
            return True
        grace = self._config.grace_seconds if self._had_door else _FIRST_DOOR_SECONDS
        return not self._doors and not self._greetings and time.monotonic() - self._alone_since > grace

    def _poll_timeout_ms(self) -> int | None:
        if self._engine is not None and self._engine.has_work:
            return 0
        if self._drain_until is not None or not self._doors or self._server.gone:
            return 200
        return None

    # --- the control socket

    def _accept(self) -> None:
        connection = self._control.accept()
        if connection is not None:
            self._poller.register(connection.socket.fileno(), zmq.POLLIN)

    def _converse(self, connection: Connection) -> None:
        received = connection.receive()
        if received is None:
            self._part(connection)
            return
        for message in received:
            try:
                self._answer(connection, message)
            except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
                connection.send({"type": "error", "reason": f"not a message: {error!r}"})

    def _answer(self, connection: Connection, message: dict[str, Any]) -> None:
        kind = message.get("type")
        if kind == "door":
            connection.identity = bytes.fromhex(message["identity"])
            connection.pid = int(message["pid"])
            if message["server_pid"] is not None:
                self._watch_server(int(message["server_pid"]))
            if message["fingerprint"] != self._config.fingerprint:
                self._refuse(connection, message)
            elif self._state == "loading":
                self._greetings.append(connection)
            else:
                self._greet(connection)
        elif kind == "status":
            connection.send(self._status())
        elif kind == "records" and self._engine is not None:
            connection.send({"type": "records", "records": self._engine.records.asked_for(message)})
        elif kind == "drain":
            timeout_s = float(message.get("timeout_s", 20.0))
            if not timeout_s >= 0:
                raise ValueError(f"timeout_s is {timeout_s}; it must be at least 0")
            self._drainers.append(connection)
            self._start_drain(timeout_s)
        else:
            connection.send({"type": "error", "reason": f"unknown message type {kind!r}"})

    def _refuse(self, connection: Connection, message: dict[str, Any]) -> None:
        ours = dataclasses.asdict(self._config)
        differing = {key: value for key, value in message["config"].items() if ours.get(key) != value}
        reason = "; ".join(f"{key} is {value!r} here and {ours.get(key)!r} there" for key, value in differing.items())
        connection.send(
            {
                "type": "refused",
                "reason": f"engine {self._config.name!r} runs with another configuration (fingerprint "
                f"{message['fingerprint']} here, {self._config.fingerprint} there): {reason}",
            }
        )

    def _greet(self, connection: Connection) -> None:
        if self._failure is not None:
            connection.send({"type": "refused", "reason": self._failure})
            return
        assert connection.identity is not None
        self._doors[connection.identity] = connection
        self._had_door = True
        self._stats_due = 0.0
        runner = self._engine.runner
        info = EngineInfo(
            engine=self._config.name,
            model=self._config.model,
            device=runner.device_name,
            max_model_len=runner.max_model_len,
            vocab_size=runner.vocab_size,
            num_blocks=runner.num_blocks,
            block_size=self._config.block_size,
            max_num_seqs=self._config.max_num_seqs,
            batch_invariant=runner.batch_invariant,
            pid=os.getpid(),
        )
        connection.send({"type": "ready", "info": msgspec.to_builtins(info)})

    def _part(self, connection: Connection) -> None:
        """A peer is gone."""
        self._poller.unregister(connection.socket.fileno())
        self._control.drop(connection)
        if connection in self._greetings:
            self._greetings.remove(connection)
        if connection in self._drainers:
            self._drainers.remove(connection)
        if connection.identity in self._doors:
            self._lose_door(connection.identity)

    def _lose_door(self, identity: bytes) -> None:
        """A door takes its requests with it; where it has said that it leaves, it is told how the engine fares now."""
        self._engine.abort([key for key in self._engine.requests if key[0] == identity])
        farewell = self._news_for_leader([]) if identity == next(iter(self._doors)) else Update([])
        farewell.last = True
        self._send(identity, farewell)
        del self._doors[identity]
        self._alone_since = time.monotonic()
        self._stats_due = 0.0
        self._report([])

    def _status(self) -> dict[str, Any]:
        status: dict[str, Any] = {
            "type": "status",
            "engine": self._config.name,
            "state": self._state,
            "model": self._config.model,
            "executor": self._config.executor,
            "pid": os.getpid(),
            "doors": len(self._doors),
            "reason": self._failure,
        }
        return status if self._engine is None else status | self._engine.status()

    # --- draining

    def _start_drain(self, timeout_s: float) -> None:
        """Refuse what is new, end what waits, let what runs finish until the time is up."""
        if self._drain_until is None:
            self._drain_until = time.monotonic() + timeout_s
        if self._engine is not None:
            waiting = [key for key, request in self._engine.requests.items() if not request.started]
            self._end(waiting, "the server is shutting down")

    def _drain(self) -> None:
        assert self._drain_until is not None
        if self._engine is not None and self._engine.requests and time.monotonic() > self._drain_until:
            self._end(list(self._engine.requests), _OUT_OF_TIME)
        if self._engine is None or not self._engine.requests:
            for connection in self._drainers:
                connection.send({"type": "drained", **self._drain_counts})
            self._drainers.clear()

    def _end(self, keys: list[tuple[bytes, int]], error: str) -> None:
        ended = self._engine.abort(keys, FINISH_ERROR, error, UNAVAILABLE)
        self._drain_counts["aborted"] += len(ended)
        self._report(ended)

    # --- requests

    def _take_commands(self) -> None:
        while True:
            try:
                identity, payload = self._commands.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            command = self._decoder.decode(payload)
            if isinstance(command, Leave):
                if identity in self._doors:
                    self._lose_door(identity)
            elif isinstance(command, Cancel):
                keys = [(identity, id_) for id_ in command.ids]
                error = "Request was cancelled" if command.reason == FINISH_CANCELLED else None
                self._report(self._engine.abort(keys, command.reason, error, CANCELLED))
            elif not command.requests and not command.advance:
                self._report([])  # a door's first word: it can be told now how the engine fares
            else:
                answers = [self._add(identity, new) for new in command.requests]
                answers += [self._advance(identity, id_) for id_ in command.advance]
                refused = [answer for answer in answers if answer is not None]
                if refused:
                    self._send(identity, Update(refused))

    def _add(self, identity: bytes, new: NewRequest) -> Output | None:
        """Queue one request; the answer to it if it is refused."""
        longest_s = self._config.max_request_seconds
        deadline = new.arrival_time + (longest_s if new.timeout_s is None else min(new.timeout_s, longest_s))
        request = Request(
            (identity, new.id),
            new.prompt_ids,
            new.sampling,
            new.arrival_time,
            stream=new.stream,
            cache_salt=new.cache_salt,
            deadline=deadline,
            priority=new.priority,
            tenant=new.tenant,
        )
        try:
            if self._drain_until is not None:
                raise Unavailable("the server is shutting down")
            if identity not in self._doors:
                raise Unavailable("the door has left")
            self._engine.add(request)
        except (InvalidRequest, Unavailable) as error:
            kind = INVALID if isinstance(error, InvalidRequest) else UNAVAILABLE
            self._engine.num_refused[kind] += 1
            return Output(new.id, finish_reason=FINISH_ERROR, error=str(error), error_kind=kind)
        return None

    def _advance(self, identity: bytes, id_: int) -> Output | None:
        """Name a sequence for the next iteration; the answer if it has ended."""
        request = self._engine.requests.get((identity, id_))
        if request is None:
            # What ends a sequence between two calls is the end of the draining; nobody was listening then.
            error, kind = "the sequence has ended", INTERNAL
            if self._drain_until is not None:
                error, kind = _OUT_OF_TIME, UNAVAILABLE
            return Output(id_, finish_reason=FINISH_ERROR, error=error, error_kind=kind)
        self._engine.scheduler.advance(request)
        return None

    def _report(self, changed: list[Request]) -> None:
        """Tell each door what is new for its requests, and the leading door how the engine fares."""
        if self._drain_until is not None:
            self._drain_counts["finished"] += sum(r.finished and r.error is None for r in changed)
        by_door: dict[bytes, list[Output]] = defaultdict(list)
        for request in changed:
            if request.finished or request.stream:
                by_door[request.key[0]].append(Output.news_of(request))
        leader = next(iter(self._doors), None)
        now = time.monotonic()
        if leader is not None and (now >= self._stats_due or not self._engine.has_work):
            self._stats_due = now + _STATS_INTERVAL_S
            self._send(leader, self._news_for_leader(by_door.pop(leader, [])))
        for identity, outputs in by_door.items():
            self._send(identity, Update(outputs))

    def _news_for_leader(self, outputs: list[Output]) -> Update:
        """With how the engine fares, and for a new leader what the one before has published."""
        leader = next(iter(self._doors))
        published = self._last_stats if leader != self._last_leader else None
        self._last_leader, self._last_stats = leader, self._engine.stats()
        return Update(outputs, self._last_stats, published)

    def _send(self, identity: bytes, update: Update) -> None:
        self._commands.send_multipart([identity, self._encoder.encode(update)], zmq.NOBLOCK)


def main() -> None:
    """Run the engine that a door has described in a JSON file: its configuration and its runtime directory."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    # The terminal's Ctrl-C is the server's business; the engine ends after its last door.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    description = json.loads(Path(sys.argv[1]).read_text())
    os.chdir(description["folder"])
    EngineProcess(EngineConfig(**description["config"]), Path(description["directory"])).run()
    # The loading thread may still be inside torch; nothing is left that would need an orderly end.
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
