"""What tests ask of a server besides its answers: its metrics, its engines and their processes."""

from __future__ import annotations

import contextlib
import http.client
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import psutil
import pytest

from helpers import ENGINES, LONG, PROMPTS, GrpcStream
from slipstream_client import control
from slipstream_client.server.tritonserver import TritonServer

# An engine answers between two steps, and on a busy machine a step may take seconds.
_ENGINE_TIMEOUT_S = 30.0
# More than an engine keeps.
_ALL_RECORDS = 1 << 16
_LAST_LINES = 40
GAUGES_AT_REST = (
    "slipstream_requests_running",
    "slipstream_requests_waiting",
    "slipstream_kv_blocks_used",
    "slipstream_kv_cache_usage",
)


class Metrics:
    """One reading of the metrics endpoint."""

    def __init__(self, server: TritonServer) -> None:
        connection = http.client.HTTPConnection(server.metrics_url, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        self._samples = [
            (name, dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value))
            for name, labels, value in re.findall(r"^(\w+)\{([^}]*)\} (\S+)$", text, re.MULTILINE)
        ]

    def samples(self, name: str, **labels: str) -> list[float]:
        """The values of all samples of that name which have these labels."""
        return [
            value
            for sample, sample_labels, value in self._samples
            if sample == name and labels.items() <= sample_labels.items()
        ]

    def value(self, name: str, engine: str, **labels: str) -> float:
        """A metric of one engine; one that was never counted is 0."""
        return sum(self.samples(f"slipstream_{name}", model=engine, **labels))

    def finished(self, engine: str, reason: str) -> float:
        """Requests of an engine that ended for a reason."""
        return self.value("requests_finished_total", engine, reason=reason)

    def at_rest(self, engine: str) -> bool:
        """All gauges of what runs and waits are there, and 0."""
        return all(self.samples(gauge, model=engine) == [0.0] for gauge in GAUGES_AT_REST)


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
    """Poll until the condition holds and return what it gave; `what` says in words what was waited for."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)
    return result


def require_running(server: TritonServer) -> None:
    """Fail with the end of the server's log if it has ended."""
    if not is_alive(server.pid):
        log = server.log_path.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        pytest.fail("tritonserver has ended; its log ends with\n" + "\n".join(log), pytrace=False)


def wait_for_gauge(server: TritonServer, engine: str, name: str, value: float, seconds: float = 30.0) -> None:
    wait_until(lambda: Metrics(server).value(name, engine) == value, f"{name} of {engine} is {value:g}", seconds)


def occupancy(server: TritonServer, engine: str = "continuous") -> tuple[int, int]:
    """How many requests run and how many wait, from the engine itself: its gauges are always a little behind."""
    status = engine_status(server, engine)
    return status["running"], status["waiting"]


def wait_for_running(server: TritonServer, engine: str, number: int) -> None:
    wait_until(lambda: occupancy(server, engine)[0] == number, f"{number} requests of {engine} run")


def wait_until_at_rest(server: TritonServer, engines: Iterable[str], seconds: float = 30.0) -> None:
    """Wait until nothing runs, waits or holds KV blocks any more, and all that has ended is counted.

    An answer arrives before the metrics tell of it: gauges alone may still be the zeros from before the request.
    """

    engines = list(engines)

    def at_rest() -> bool:
        try:
            statuses = [engine_status(server, engine) for engine in engines]
        except control.EngineUnreachable:  # it is being started again
            return False
        metrics = Metrics(server)
        return all(
            # The metrics outlive an engine process and its own count.
            metrics.value("requests_finished_total", engine) >= sum(status["finished"].values())
            and status["running"] == status["waiting"] == 0
            and metrics.at_rest(engine)
            for engine, status in zip(engines, statuses, strict=True)
        )

    wait_until(at_rest, f"{', '.join(engines)} and their metrics are at rest", seconds)


def finished(server: TritonServer, engine: str, reason: str) -> float:
    """Requests that have ended for a reason, when nothing runs any more."""
    wait_until_at_rest(server, [engine])
    return Metrics(server).finished(engine, reason)


def engine_status(server: TritonServer, engine: str) -> dict[str, Any]:
    """What an engine says of itself."""
    return control.request(server.runtime_dir / f"{engine}.sock", {"type": "status"}, _ENGINE_TIMEOUT_S)


def times_left(server: TritonServer, model: str) -> int:
    """How often the model was unloaded in order, to the end of its finalize(), by the server's log."""
    return server.log_path.read_text(errors="replace").count(f"{model}: has left its engine")


def step_records(server: TritonServer, engine: str = "continuous", *, since: float) -> list[dict[str, Any]]:
    """What was done in each step that began after this time of `time.monotonic`, which all processes share."""
    message = {"type": "records", "last": _ALL_RECORDS}
    answer = control.request(server.runtime_dir / f"{engine}.sock", message, _ENGINE_TIMEOUT_S)
    return [record for record in answer["records"] if record["start_s"] > since]


@contextlib.contextmanager
def others_running(server: TritonServer, number: int) -> Iterator[None]:
    """So many other requests run in the continuous engine, and are cancelled in the end."""
    with GrpcStream(server) as others:
        for index in range(number):
            prompt = PROMPTS[index % len(PROMPTS)]
            others.send("continuous", prompt, request_id=f"other {index}", stream=False, **LONG)
        wait_for_running(server, "continuous", number)
        yield
        others.cancel()


def engine_pid(server: TritonServer, engine: str) -> int:
    return int(engine_status(server, engine)["pid"])


def engine_pids(server: TritonServer) -> dict[str, int]:
    """The processes of all engines that the server's models need."""
    return {engine: engine_pid(server, engine) for engine in sorted({ENGINES[model] for model in server.models})}


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and was not yet reaped does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


_COUNTERS = (
    "prompt_tokens_total",
    "generation_tokens_total",
    "useful_tokens_total",
    "computed_tokens_total",
    "steps_total",
    "preemptions_total",
    "kv_waste_steps_total",
)


class Counted:
    """How much every counter of an engine grew between `with` and its end."""

    def __init__(self, server: TritonServer, engine: str) -> None:
        self._server, self._engine = server, engine

    def __enter__(self) -> Counted:
        wait_until_at_rest(self._server, [self._engine])
        self._before = Metrics(self._server)
        return self

    def __exit__(self, *_: object) -> None:
        wait_until_at_rest(self._server, [self._engine])
        after = Metrics(self._server)
        self.added = {
            name: after.value(name, self._engine) - self._before.value(name, self._engine) for name in _COUNTERS
        }
        self.finished = {
            reason: after.finished(self._engine, reason) - self._before.finished(self._engine, reason)
            for reason in ("stop", "length", "cancelled", "error")
        }
