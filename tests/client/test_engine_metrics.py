"""Counters of a run, read from a metrics page that changes as an engine's would."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slipstream_client.comparison.engine_metrics import EngineFigures, EngineWatch, parse_scrape
from slipstream_client.server.ports import free_ports

PAGE = """# HELP slipstream_steps_total Steps
# TYPE slipstream_steps_total counter
slipstream_steps_total{{model="continuous",version="1",batcher="continuous"}} {steps}
slipstream_useful_tokens_total{{model="continuous",version="1",batcher="continuous"}} {useful}
slipstream_computed_tokens_total{{model="continuous",version="1",batcher="continuous"}} {computed}
slipstream_computed_tokens_total{{model="dynamic",version="1",batcher="dynamic"}} 77777
slipstream_kv_waste_steps_total{{model="continuous",version="1",batcher="continuous"}} {waste}
slipstream_kv_blocks_peak{{model="continuous",version="1",batcher="continuous"}} {peak}
slipstream_preemptions_total{{model="continuous",version="1",batcher="continuous"}} 2
slipstream_requests_finished_total{{model="continuous",version="1",batcher="continuous",reason="stop"}} 3
slipstream_requests_finished_total{{model="continuous",version="1",batcher="continuous",reason="length"}} 4
slipstream_requests_running{{model="continuous",version="1",batcher="continuous"}} {running}
slipstream_requests_waiting{{model="continuous",version="1",batcher="continuous"}} 0
nv_inference_count{{model="continuous",version="1"}} {inferences}
nv_inference_count{{model="continuous_unary",version="1"}} 5
nv_inference_exec_count{{model="continuous",version="1"}} {executions}
"""

IDLE = {
    "steps": 10,
    "useful": 100,
    "computed": 200,
    "waste": 0.5,
    "peak": 90,
    "running": 0,
    "inferences": 12,
    "executions": 4,
}


class MetricsPage:
    """A metrics endpoint whose page a test changes."""

    def __init__(self) -> None:
        self.values = dict(IDLE)
        self._read = threading.Semaphore(0)
        page = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(PAGE.format(**page.values).encode())
                page._read.release()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"127.0.0.1:{self.server.server_port}"

    def wait_until_read(self) -> None:
        """Until the page as it is now has been read: the second reading from now on began after this call."""
        while self._read.acquire(blocking=False):
            pass
        for _ in range(2):
            assert self._read.acquire(timeout=30)


@pytest.fixture
def page() -> Iterator[MetricsPage]:
    metrics = MetricsPage()
    threading.Thread(target=metrics.server.serve_forever, daemon=True).start()
    yield metrics
    metrics.server.shutdown()
    metrics.server.server_close()


def test_one_engines_metrics_are_picked_and_summed_over_further_labels() -> None:
    scrape = parse_scrape(PAGE.format(**IDLE), "continuous", "continuous")
    assert scrape.get("slipstream_computed_tokens_total") == 200
    assert scrape.get("slipstream_requests_finished_total") == 7
    assert scrape.get("nv_inference_count") == 12
    assert parse_scrape(PAGE.format(**IDLE), "continuous", "continuous_unary").get("nv_inference_count") == 5
    assert not scrape.busy


def test_a_run_is_the_difference_and_its_peak_is_its_own(page: MetricsPage) -> None:
    watch = EngineWatch(page.url, "continuous", "continuous")
    watch.start()
    page.wait_until_read()  # as the run before left it, with its higher peak
    page.values |= {"steps": 11, "peak": 40, "running": 3}
    page.wait_until_read()
    page.values |= {"steps": 12, "peak": 30}
    threading.Timer(
        0.3,
        lambda: page.values.update(
            {
                "steps": 20,
                "useful": 160,
                "computed": 300,
                "waste": 3.0,
                "peak": 20,
                "running": 0,
                "inferences": 21,
                "executions": 7,
            }
        ),
    ).start()
    figures = watch.stop()
    assert figures == EngineFigures(
        useful_tokens=60,
        computed_tokens=100,
        padding_fraction=pytest.approx(0.4),
        kv_waste_fraction=pytest.approx(2.5 / 10),
        kv_peak_blocks=40,
        preemptions=0,
        triton_inferences=9,
        triton_executions=3,
    )


def test_nobody_at_the_address_leaves_every_figure_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream_client.comparison.engine_metrics._SETTLED_S", 0.0)
    (port,) = free_ports(1)
    watch = EngineWatch(f"127.0.0.1:{port}", "continuous", "continuous")
    watch.start()
    assert watch.stop() == EngineFigures()
