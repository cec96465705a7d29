"""The door `admin`: what the engines of this server say of themselves, asked through Triton. Off unless enabled."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from slipstream.config import read_bool, runtime_directory
from slipstream.doors.door import error_response, read_scalar, text_tensor
from slipstream.engine.control import receive_message, send_message
from slipstream.errors import InvalidRequest, Unavailable

_TIMEOUT_S = 5.0
# What changes an engine is not among them.
_FIELDS: Mapping[str, frozenset[str]] = {
    "engines": frozenset(),
    "status": frozenset(["engine"]),
    "records": frozenset(["engine", "since", "count", "last"]),
}


class AdminDoor:
    """Passes a command on to an engine's control socket, and its answer back."""

    def initialize(self, args: dict[str, str]) -> None:
        """Find the engines' sockets; the engines themselves may come and go."""
        parameters = json.loads(args["model_config"]).get("parameters", {})
        configured = parameters.get("enabled", {}).get("string_value", "false")
        self._enabled = read_bool("enabled", os.environ.get("SLIPSTREAM_ADMIN") or configured)
        self._directory = runtime_directory()

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer each command by itself."""
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        try:
            if not self._enabled:
                raise Unavailable(
                    "the admin model is off; SLIPSTREAM_ADMIN=true turns it on, or its parameter `enabled`"
                )
            answer = self._answer(_read_command(read_scalar(request, "command")))
        except Exception as error:
            return error_response(error)
        return pb_utils.InferenceResponse(output_tensors=[text_tensor("answer", [json.dumps(answer)], (1,))])

    def _answer(self, command: dict[str, Any]) -> dict[str, Any]:
        sockets = {path.stem: path for path in sorted(self._directory.glob("*.sock"))}
        if command["type"] == "engines":
            return {"type": "engines", "engines": list(sockets)}
        name = command.pop("engine", None)
        if name not in sockets:
            raise InvalidRequest(f"engine is {name!r}; allowed are {', '.join(sockets) or 'none, no engine runs'}")
        answer = _ask(sockets[name], command)
        if answer["type"] == "error":
            raise InvalidRequest(answer["reason"])
        return answer


def _read_command(text: bytes) -> dict[str, Any]:
    try:
        command = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"command is no JSON: {error}") from None
    if not isinstance(command, dict) or command.get("type") not in _FIELDS:
        raise InvalidRequest(f"command is {text[:200]!r}; it must be an object whose type is {', '.join(_FIELDS)}")
    unknown = sorted(set(command) - _FIELDS[command["type"]] - {"type"})
    if unknown:
        raise InvalidRequest(f"command has an unknown field {unknown[0]!r} for the type {command['type']!r}")
    return command


def _ask(path: Path, message: dict[str, Any]) -> dict[str, Any]:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.connect(str(path))
            send_message(connection, message)
            return receive_message(connection)
    except OSError as error:
        raise Unavailable(f"engine {path.stem} does not answer ({error or type(error).__name__})") from error
