"""What the targets over HTTP share: one session of kept connections, failures by name, server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from slipstream_client.http_client import CODE_OF_STATUS, error_text
from slipstream_client.tensors import RequestFailed

# Less than after which common servers close an idle connection (uvicorn: 5 s), so that no request meets one closing.
_KEEP_ALIVE_S = 4.0


class HttpSession:
    """`timeout_s` bounds each request, from connecting to the end of its answer.

    Nothing is sent twice: aiohttp repeats no POST, whatever becomes of its connection. Without `keeps_connections` each
    request has one of its own, for servers that close one after an answer without having said so.
    """

    def __init__(self, url: str, timeout_s: float | None = None, *, keeps_connections: bool = True) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._timeout_s = timeout_s
        self._keeps_connections = keeps_connections
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """End all connections."""
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def exchange(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request; what fails while the answer is read fails here. Leaving early closes the connection.

        Raises:
            RequestFailed: refused, cut off, or not answered in time.
        """
        # Made where it is first used: it belongs to the event loop that runs then.
        self._session = self._session or self._connect()
        try:
            async with self._session.request(method, self.url + path, json=body) as response:
                if response.status != 200:
                    text = error_text(await response.read()) or f"HTTP status {response.status}"
                    raise RequestFailed(text, CODE_OF_STATUS.get(response.status, "UNKNOWN"))
                yield response
        except asyncio.TimeoutError:
            raise RequestFailed(f"not answered within {self._timeout_s:g} s", "DEADLINE_EXCEEDED") from None
        except aiohttp.ClientConnectorError as error:
            raise RequestFailed(f"no server answers at {self.url}", "UNAVAILABLE") from error
        except aiohttp.InvalidURL as error:
            raise RequestFailed(f"{self.url} is no address", "INVALID_ARGUMENT") from error
        except (aiohttp.ClientError, OSError) as error:
            raise RequestFailed(f"the connection to {self.url} broke ({error})", "UNAVAILABLE") from error

    def _connect(self) -> aiohttp.ClientSession:
        if self._keeps_connections:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        else:
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            # Compressed events may wait for each other, and Triton compresses what it can.
            headers={"Accept-Encoding": "identity"},
        )


async def read_events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[float, bytes]]:
    """Yield the arrival, by `time.perf_counter()`, and the data of each server-sent event."""
    rest = b""
    async for received in response.content.iter_any():
        now = time.perf_counter()  # of all that came together
        *events, rest = (rest + received).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            if data := _data(event):
                yield now, data
    if data := _data(rest):
        yield time.perf_counter(), data


def parse_object(data: bytes) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        RequestFailed: it is none.
    """
    try:
        parsed = json.loads(data)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        shown = data[:100].decode("utf-8", "replace")
        raise RequestFailed(f"the server sent what is no JSON object: {shown}", "INTERNAL")
    return parsed


def _data(event: bytes) -> bytes:
    lines = (line.partition(b":") for line in event.split(b"\n"))
    return b"\n".join(value.removeprefix(b" ") for field, _, value in lines if field == b"data")
