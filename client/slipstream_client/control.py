"""Talk to a running engine over its control socket: status, drain, step records.

A message is a 4-byte little-endian length followed by that many bytes of JSON, in both directions. The socket lies in
the server's runtime directory under the engine's name.
"""

from __future__ import annotations

import json
import socket
import struct
from pathlib import Path
from typing import Any

from slipstream_client.errors import SlipstreamError

_LENGTH = struct.Struct("<I")


class EngineUnreachable(SlipstreamError):
    """No engine answers on that socket."""


def list_engines(runtime_dir: Path) -> list[Path]:
    """Control sockets in a server's runtime directory, by name; one may belong to an engine that is gone."""
    return sorted(runtime_dir.glob("*.sock"))


def request(path: Path, message: dict[str, Any], timeout_s: float = 5.0) -> dict[str, Any]:
    """Send one message to the engine at `path` and return its answer.

    Raises:
        EngineUnreachable: nothing listens there, or no answer came within `timeout_s` seconds.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            payload = json.dumps(message).encode()
            connection.sendall(_LENGTH.pack(len(payload)) + payload)
            (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
            return json.loads(_receive(connection, length))
    except OSError as error:
        raise EngineUnreachable(f"engine {path.stem} does not answer ({error or type(error).__name__})") from error


def _receive(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = connection.recv(count - len(received))
        if not part:
            raise ConnectionResetError("the engine closed the connection")
        received += part
    return received
