"""`slipstream top` over a metrics page that a test writes: what it works out, shows and survives."""

from __future__ import annotations

import fcntl
import io
import json
import math
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from slipstream_client import cli
from slipstream_client.server.ports import free_ports
from slipstream_client.watch.show import Screen, bar, duration
from slipstream_client.watch.window import EngineView, Window, quantile, read_engines

TOP = [sys.executable, "-c", "from slipstream_client.cli import main; main()", "top"]
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
TTFT = "slipstream_time_to_first_token_seconds_bucket"


def page(engine: str = "continuous", batcher: str | None = None, /, **values: float) -> str:
    """An engine's metrics by their names without `slipstream_`; those of Triton's bear `nv_`."""
    known = {"engine_up": 1, "requests_running": 0, "generation_tokens_total": 0, **values}
    labels = f'{{batcher="{batcher or engine}",model="{engine}",version="1"}}'
    return "".join(
        f"{name if name.startswith('nv_') else 'slipstream_' + name}{labels} {value}\n" for name, value in known.items()
    )


def ttft_page(counts: Mapping[str, float], engine: str = "continuous") -> str:
    """Requests with a time to their first token of at most each edge."""
    return "".join(f'{TTFT}{{model="{engine}",le="{edge}"}} {count}\n' for edge, count in counts.items())


def view_of(*pages: str, seconds: float = 60.0) -> EngineView:
    """The one engine of these pages, which were read a second apart."""
    window = Window(seconds)
    for now, text in enumerate(pages):
        window.add(float(now), read_engines(text))
    (view,) = window.views()
    return view


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.5, 1.5),  # the 4th of 8 is the 2nd of 4 between 1 and 2
        (0.25, 1.0),
        (0.125, 0.5),  # below the first edge: from 0 on
        (0.99, 2.0),  # beyond the last finite edge
    ],
)
def test_a_quantile_is_where_prometheus_would_put_it(share: float, expected: float) -> None:
    buckets = [(math.inf, 8.0), (2.0, 6.0), (0.5, 1.0), (1.0, 2.0)]
    assert quantile(share, buckets) == pytest.approx(expected)


def test_a_histogram_without_values_has_no_quantile() -> None:
    assert quantile(0.5, []) is None
    assert quantile(0.5, [(1.0, 0.0), (math.inf, 0.0)]) is None


def test_rates_are_increases_over_the_window_alone() -> None:
    pages = [page(generation_tokens_total=total) for total in (1000, 5000, 5010, 5040)]
    assert view_of(*pages, seconds=2.0).generated_tokens_per_s == pytest.approx(40 / 2)
    assert view_of(*pages, seconds=0.5).generated_tokens_per_s == pytest.approx(30)
    assert view_of(pages[0]).generated_tokens_per_s is None


def test_a_counter_that_began_anew_gives_no_negative_rate() -> None:
    view = view_of(*(page(generation_tokens_total=total, preemptions_total=1) for total in (100, 110, 5, 9)))
    assert view.generated_tokens_per_s == pytest.approx((10 + 5 + 4) / 3)
    assert (view.preemptions, view.new_preemptions) == (1, 0)


def test_percentiles_are_of_what_came_within_the_window() -> None:
    before, after = {"0.1": 100, "0.2": 100, "+Inf": 100}, {"0.1": 100, "0.2": 110, "+Inf": 110}
    view = view_of(page() + ttft_page(before), page() + ttft_page(after))
    assert view.ttft_s == {
        "p50": pytest.approx(0.15),
        "p90": pytest.approx(0.19),
        "p99": pytest.approx(0.199),
    }
    assert view.e2e_s is None
    assert view_of(page() + ttft_page(before), page() + ttft_page(before)).ttft_s is None


def test_a_lock_step_model_streams_nothing_and_has_tritons_queue_before_it() -> None:
    counts: list[dict[str, float]] = [
        {"nv_inference_request_success": done, "nv_inference_queue_duration_us": queued}
        for done, queued in [(4, 1e6), (6, 4e6)]
    ]
    pages = [
        page("dynamic", requests_waiting=2, nv_inference_pending_request_count=3, **more)
        + ttft_page({"+Inf": number}, "dynamic")
        for number, more in enumerate(counts)
    ]
    view = view_of(*pages)
    assert view.waiting == 5
    assert view.triton_queue_mean_s == pytest.approx(1.5)
    assert (view.streams, view.ttft_s) == (False, None)


def test_refusals_are_summed_over_their_reasons() -> None:
    pages = [
        page() + f'slipstream_requests_refused_total{{model="continuous",reason="unavailable"}} {count}\n'
        'slipstream_requests_refused_total{model="continuous",reason="invalid"} 2\n'
        for count in (1, 4)
    ]
    assert (view_of(*pages).refusals, view_of(*pages).new_refusals) == (6, 3)


BUSY = page(
    "continuous",
    requests_running=16,
    requests_waiting=120,
    kv_blocks_used=546,
    kv_blocks_total=1092,
    generation_tokens_total=1234.5,
) + ttft_page({"0.1": 0, "1": 50, "+Inf": 50})


def shown(width: int) -> list[str]:
    window = Window(10.0)
    window.add(0.0, read_engines(page("continuous") + page("static", engine_up=0)))
    window.add(1.0, read_engines(BUSY + page("static", engine_up=0)))
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(Screen("127.0.0.1:8002", window.views()))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("width", "headers"),
    [
        (
            170,
            "engine run wait tok/s prompt KV blocks KV used TTFT p50/90/99 ITL p50/90/99 E2E p50/90/99 "
            "queue preempted refused",
        ),
        (80, "engine run wait tok/s KV blocks TTFT p50/90/99 E2E p50/90/99"),
        (40, "engine run wait tok/s"),
        (12, "engine"),
    ],
)
def test_a_narrow_terminal_loses_columns_by_importance_and_no_figure_is_cut(width: int, headers: str) -> None:
    lines = shown(width)
    assert all(len(line) <= width for line in lines)
    assert " ".join(lines[1].split()) == headers
    continuous = lines[3].split()
    expected = ["continuous", "up", "16", "120", "1234.5"]
    if width >= 80:
        assert "546/1092" in continuous
        assert "550ms/910ms/991ms" in continuous
        assert lines[4].split()[:2] == ["static", "DOWN"]
        assert "no-stream" in lines[4]
    if width == 170:
        assert "████░░░░" in continuous
        expected.append("0.0")
    assert continuous[: len(expected)] == expected[: len(continuous)]


def test_the_bar_shows_whatever_is_in_use() -> None:
    assert [bar(used, 1092) for used in (0, 1, 546, 1092)] == ["░░░░░░░░", "█░░░░░░░", "████░░░░", "████████"]
    assert bar(0, 0) == "░░░░░░░░"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0042, "4.2ms"), (0.25, "250ms"), (0.9996, "1.0s"), (12.34, "12.3s"), (640.0, "640s"), (None, "-")],
)
def test_durations_have_a_unit_that_fits(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@dataclass
class MetricsServer:
    """A metrics endpoint whose page a test changes; with None it answers as a server that goes."""

    text: str | None
    url: str = ""


@pytest.fixture
def metrics() -> Iterator[MetricsServer]:
    served = MetricsServer(page("continuous") + page("static"))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = served.text
            self.send_response(200 if text is not None and self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write((text or "").encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.url = f"127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield served
    server.shutdown()
    server.server_close()


def top(*arguments: str) -> Any:
    return CliRunner().invoke(cli.make_app([]), ["top", *arguments])


def test_once_prints_one_plain_line_for_each_engine(metrics: MetricsServer) -> None:
    metrics.text = BUSY + page("static", engine_up=0)
    result = top("--url", f"http://{metrics.url}/metrics", "--once", "--interval", "0.1")
    assert result.exit_code == 0, result.output
    first, second = (line.split(" ", 1)[1] for line in result.stdout.splitlines())
    assert first == (
        "continuous up run=16 wait=120 kv=546/1092 tok/s=0.0 prompt/s=0.0 ttft=- itl=- e2e=- queue=- "
        "preempted=0 refused=0"
    )
    assert second.startswith(
        "static DOWN run=0 wait=0 kv=0/0 tok/s=0.0 prompt/s=0.0 ttft=no-stream itl=no-stream e2e=-"
    )


def test_json_is_an_object_for_each_reading(metrics: MetricsServer) -> None:
    metrics.text = BUSY
    reading = json.loads(top("--url", metrics.url, "--once", "--interval", "0.1", "--json").stdout)
    (engine,) = reading["engines"]
    assert reading["error"] is None
    assert (engine["engine"], engine["running"], engine["waiting"], engine["kv_blocks_used"]) == (
        "continuous",
        16,
        120,
        546,
    )
    assert (engine["generated_tokens_per_s"], engine["ttft_s"]) == (0.0, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "is no metrics endpoint (port 8002 by default)"), ("nv_inference_count{} 3\n", "tells of no engine")],
)
def test_an_address_that_is_another_ones_is_said_in_one_line(
    metrics: MetricsServer, text: str | None, said: str
) -> None:
    metrics.text = text
    ended = subprocess.run([*TOP, "--url", metrics.url], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"slipstream: {metrics.url} {said}")
    assert ended.stderr.count("\n") == 1


def test_nobody_at_the_address_is_said_in_one_line() -> None:
    (port,) = free_ports(1)
    ended = subprocess.run(
        [*TOP, "--url", f"127.0.0.1:{port}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"slipstream: no server answers at 127.0.0.1:{port} (")
    assert ended.stderr.count("\n") == 1


def read_until(stream: Any, wanted: str) -> str:
    """The first line that has it."""
    for line in stream:
        if wanted in line:
            return str(line)
    raise AssertionError(f"it ended without {wanted!r}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_goes_away_is_shown_and_comes_back_by_itself(
    metrics: MetricsServer, number: signal.Signals
) -> None:
    command = [*TOP, "--url", metrics.url, "--interval", "0.1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    read_until(process.stdout, "continuous up")
    metrics.text = None
    assert "no answer: HTTP status 404" in read_until(process.stdout, "no answer")
    metrics.text = page(generation_tokens_total=7)
    assert " tok/s=- " in read_until(process.stdout, "continuous up"), "what came meanwhile is not of this window"
    assert " tok/s=0.0 " in read_until(process.stdout, "continuous up")
    process.send_signal(number)
    rest, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    assert "\x1b" not in rest


def test_a_reader_that_has_seen_enough_ends_it_quietly(metrics: MetricsServer) -> None:
    command = [*TOP, "--url", metrics.url, "--interval", "0.1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=30) == 0
    assert process.stderr.read() == b""
    process.stderr.close()


def test_on_a_terminal_it_draws_one_table_until_ctrl_c_and_leaves_the_cursor(metrics: MetricsServer) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        os.execv(TOP[0], [*TOP, "--url", metrics.url, "--interval", "0.1"])
    drawn = b""
    interrupted = False
    while True:
        try:
            drawn += os.read(terminal, 1 << 16)
        except OSError:  # it has ended
            break
        if drawn.count(b"static") >= 3 and not interrupted:
            os.write(terminal, b"\x03")
            interrupted = True
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)
    text = drawn.decode()
    lines = ESCAPE.sub("", text).replace("\r", "").split("\n")
    assert any(line.split()[:4] == ["engine", "run", "wait", "tok/s"] for line in lines)
    assert max(map(len, lines)) <= 80 + len(metrics.url) + len("  00:00:00"), "a frame follows the last one's last line"
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "\x1b[1A" in text, "each table is drawn over the one before"
    assert "Traceback" not in text
