"""Triton's management endpoints over HTTP: is it alive, what is ready, load and unload, the metrics page."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import quote

from slipstream_client.errors import SlipstreamError


class TritonUnreachable(SlipstreamError):
    """Nothing answers at the address, or it is no HTTP server."""


class TritonRefused(SlipstreamError):
    """The server answered with an error; its text is Triton's."""


class TritonHttp:
    """One Triton server. Each call opens a connection of its own, so any thread may call.

    Raises, from every method: TritonUnreachable, and TritonRefused where the answer is more than yes or no.
    """

    def __init__(self, url: str, timeout_s: float = 5.0) -> None:
        self.url = url.removeprefix("http://").rstrip("/")
        self.timeout_s = timeout_s

    def is_live(self) -> bool:
        return self._exchange("GET", "/v2/health/live")[0] == 200

    def is_ready(self) -> bool:
        return self._exchange("GET", "/v2/health/ready")[0] == 200

    def is_model_ready(self, model: str) -> bool:
        return self._exchange("GET", f"/v2/models/{quote(model, safe='')}/ready")[0] == 200

    def model_states(self) -> dict[str, str]:
        """State of every model in the server's repository, such as READY; empty for one that was never loaded."""
        answer = self._answer("POST", "/v2/repository/index")
        try:
            return {entry["name"]: entry.get("state", "") for entry in json.loads(answer)}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise TritonRefused(f"what answers at {self.url} is no Triton") from error

    def load(self, model: str, timeout_s: float) -> None:
        """Load a model and return when it is ready."""
        self._answer("POST", f"/v2/repository/models/{quote(model, safe='')}/load", timeout_s)

    def unload(self, model: str, timeout_s: float) -> None:
        """Tell the server to unload a model; it goes on doing so after the answer."""
        self._answer("POST", f"/v2/repository/models/{quote(model, safe='')}/unload", timeout_s)

    def metrics(self) -> str:
        """The Prometheus page, if this is the address of the metrics."""
        return self._answer("GET", "/metrics").decode(errors="replace")

    def _answer(self, method: str, path: str, timeout_s: float | None = None) -> bytes:
        status, body = self._exchange(method, path, timeout_s)
        if status != 200:
            raise TritonRefused(_error_text(body) or f"HTTP status {status} from {self.url}{path}")
        return body

    def _exchange(self, method: str, path: str, timeout_s: float | None = None) -> tuple[int, bytes]:
        try:
            connection = http.client.HTTPConnection(self.url, timeout=timeout_s or self.timeout_s)
        except http.client.InvalidURL as error:
            raise TritonUnreachable(f"{self.url} is no host:port") from error
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            # What is no HTTP may be quoted in it, with bytes that are no text.
            reason = str(error) if str(error).isprintable() and str(error) else type(error).__name__
            raise TritonUnreachable(f"no server answers at {self.url} ({reason})") from error
        finally:
            connection.close()


def _error_text(body: bytes) -> str:
    """First line of Triton's error text; below it stands a Python traceback."""
    try:
        answer: Any = json.loads(body)
        return str(answer["error"]).strip().splitlines()[0]
    except (ValueError, KeyError, TypeError, IndexError):
        return ""
