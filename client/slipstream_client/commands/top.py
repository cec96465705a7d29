"""`slipstream top`: what each engine of a running server does now, from its metrics endpoint alone."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from slipstream_client.errors import SlipstreamError
from slipstream_client.interruption import ended_as_by_ctrl_c
from slipstream_client.server.triton_http import TritonHttp, TritonRefused, TritonUnreachable
from slipstream_client.watch.show import Screen, line
from slipstream_client.watch.window import EngineReading, Window, read_engines

_ANSWER_TIMEOUT_S = 3.0


def top(
    url: Annotated[str, typer.Option(help="Host and port of the server's metrics.")] = "127.0.0.1:8002",
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two readings.")] = 1.0,
    window: Annotated[
        float, typer.Option(min=0.1, max=86400, help="Seconds that rates and percentiles are taken over.")
    ] = 15.0,
    once: Annotated[bool, typer.Option("--once", help="Show what one interval brought, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a reading for a program.")] = False,
) -> None:
    """Show running and waiting requests, KV memory, tokens per second and latencies of each engine, until Ctrl-C.

    Without a terminal it prints a line for each engine and interval. Percentiles are estimated from histogram buckets.
    """
    watch = _Watch(url, interval, window)
    try:
        with ended_as_by_ctrl_c():
            watch.read_first()
            if once:
                watch.wait()
                screen = watch.read()
                _print(screen, as_json)
                if screen.error is not None:
                    raise typer.Exit(1)
            elif as_json or not sys.stdout.isatty():
                while True:
                    watch.wait()
                    _print(watch.read(), as_json)
            else:
                _show_live(watch)
    except KeyboardInterrupt:
        return
    except BrokenPipeError:  # whoever read has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Watch:
    """Reads the endpoint at a steady pace."""

    def __init__(self, url: str, interval_s: float, window_s: float) -> None:
        self._server = TritonHttp(url.rstrip("/").removesuffix("/metrics"), _ANSWER_TIMEOUT_S)
        self._interval_s = interval_s
        self._window = Window(window_s)
        self._due = time.monotonic()

    def read_first(self) -> None:
        """Take the first reading.

        Raises:
            SlipstreamError: nobody answers, or it is nobody who knows of engines.
        """
        try:
            engines = self._engines()
        except TritonRefused as error:
            raise SlipstreamError(
                f"{self._server.url} is no metrics endpoint (port 8002 by default): {error}"
            ) from error
        if not engines:
            raise SlipstreamError(f"{self._server.url} tells of no engine: has the server one of Slipstream's models?")
        self._window.add(time.monotonic(), engines)

    def wait(self) -> None:
        """Wait for the next reading's time; those that were missed are left out."""
        self._due = max(self._due + self._interval_s, time.monotonic())
        time.sleep(max(0.0, self._due - time.monotonic()))

    def read(self) -> Screen:
        """The next reading; an endpoint that does not answer is asked again the next time."""
        try:
            self._window.add(time.monotonic(), self._engines())
        except (TritonUnreachable, TritonRefused) as error:
            self._window.clear()
            return Screen(self._server.url, [], str(error))
        return Screen(self._server.url, self._window.views())

    def _engines(self) -> dict[str, EngineReading]:
        return read_engines(self._server.metrics())


def _show_live(watch: _Watch) -> None:
    with Live(console=Console(highlight=False), auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            watch.wait()
            live.update(watch.read(), refresh=True)


def _print(screen: Screen, as_json: bool) -> None:
    if as_json:
        engines = [asdict(view) for view in screen.views]
        print(json.dumps({"time": time.time(), "error": screen.error, "engines": engines}), flush=True)
    elif sys.stdout.isatty():
        Console(highlight=False).print(screen)
    else:
        now = time.strftime("%H:%M:%S")
        lines = [line(view, now) for view in screen.views]
        if not lines:
            lines = [f"{now} " + ("no engine is loaded" if screen.error is None else f"no answer: {screen.error}")]
        print("\n".join(lines), flush=True)
