"""The engine's control socket: doors announce themselves and stay connected, tools ask for status or a drain.

A message is a 4-byte little-endian length followed by JSON. A connection's end-of-file is how each side learns that
the other is gone, however it died.
"""

from __future__ import annotations

import json
import socket
import struct
from pathlib import Path
from typing import Any

_LENGTH = struct.Struct("<I")
_MOST_BYTES = 1 << 20


class Connection:
    """One peer of the control socket; `identity` and `pid` are set once it has said that it is a door."""

    def __init__(self, peer: socket.socket) -> None:
        self.socket = peer
        self.identity: bytes | None = None
        self.pid: int | None = None
        self._received = b""

    def receive(self) -> list[dict[str, Any]] | None:
        """Whole messages that have arrived; None when the peer is gone or does not speak the protocol."""
        try:
            part = self.socket.recv(65536)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not part:
            return None
        self._received += part
        messages = []
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > _MOST_BYTES:
                return None
            end = _LENGTH.size + length
            if len(self._received) < end:
                break
            try:
                message = json.loads(self._received[_LENGTH.size : end])
            except ValueError:
                return None
            if not isinstance(message, dict):
                return None
            messages.append(message)
            self._received = self._received[end:]
        return messages

    def send(self, message: dict[str, Any]) -> None:
        """Send one message; a peer that is gone is noticed when it is read next."""
        try:
            self.socket.settimeout(1.0)
            send_message(self.socket, message)
        except OSError:
            pass
        finally:
            self.socket.setblocking(False)


class ControlSocket:
    """Listens at a path in the runtime directory."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._path = path
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(path))
        self.listener.listen(64)
        self.listener.setblocking(False)
        self.connections: dict[int, Connection] = {}  # by file descriptor

    def accept(self) -> Connection | None:
        try:
            peer, _ = self.listener.accept()
        except BlockingIOError:
            return None
        peer.setblocking(False)
        connection = Connection(peer)
        self.connections[peer.fileno()] = connection
        return connection

    def drop(self, connection: Connection) -> None:
        del self.connections[connection.socket.fileno()]
        connection.socket.close()

    def close(self) -> None:
        """Stop listening and hang up on everyone."""
        self._path.unlink(missing_ok=True)
        self.listener.close()
        for connection in list(self.connections.values()):
            self.drop(connection)


def send_message(peer: socket.socket, message: dict[str, Any]) -> None:
    """Write one framed message to a connected socket."""
    payload = json.dumps(message).encode()
    peer.sendall(_LENGTH.pack(len(payload)) + payload)


def receive_message(peer: socket.socket) -> dict[str, Any]:
    """Read one framed message from a blocking socket.

    Raises:
        ConnectionError: the peer closed the connection.
    """
    (length,) = _LENGTH.unpack(_receive_exactly(peer, _LENGTH.size))
    message: dict[str, Any] = json.loads(_receive_exactly(peer, length))
    return message


def _receive_exactly(peer: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = peer.recv(count - len(received))
        if not part:
            raise ConnectionResetError("the engine closed the connection")
        received += part
    return received
