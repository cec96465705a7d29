"""The generator's own lag: measured where it arises, and a run that it spoils is called invalid."""

from __future__ import annotations

import asyncio
import time

import pytest

from fake_triton import FakeTriton
from slipstream_client.load.arrivals import ClosedLoop, Replay
from slipstream_client.load.generator import LoadOptions, LoadReport, run_load
from slipstream_client.load.lag import ClientLag, LagMeter, Spread, too_late
from slipstream_client.load.targets import make_target
from slipstream_client.load.workload import make_workload

QUIET = Spread(0.1, 1.0, 30.0)


def test_percentiles_are_in_milliseconds() -> None:
    spread = Spread.of_seconds([0.0, 0.1])
    assert spread == Spread(p50=50.0, p99=pytest.approx(99.0), max=100.0)
    assert Spread.of_seconds([]) is None


def test_a_late_wake_stands_for_those_that_it_kept_from_coming() -> None:
    """35 ms late at a beat of 10 ms: the three that were due meanwhile would have been 25, 15 and 5 ms late."""
    meter = LagMeter()
    meter.note_beat(0.035)
    assert meter.lag() == ClientLag(None, Spread(pytest.approx(20.0), pytest.approx(34.7), pytest.approx(35.0)))


def test_the_worst_of_both_delays_is_what_a_run_reports() -> None:
    lag = ClientLag(sending=Spread(2.0, 3.0, 4.0), loop=Spread(1.0, 9.0, 12.0))
    assert lag.worst() == {"p50": 2.0, "p99": 9.0, "max": 12.0}
    assert ClientLag(None, None).worst() is None


@pytest.mark.parametrize(
    ("lag", "median_ms", "reason"),
    [
        (ClientLag(QUIET, QUIET), 20.0, None),
        (ClientLag(None, Spread(1.0, 10.0, 500.0)), 20.0, None),
        (ClientLag(None, Spread(1.0, 11.0, 11.0)), 20.0, "event loop woke 11 ms late (P99), where 10 ms"),
        (ClientLag(None, Spread(1.0, 11.0, 11.0)), 1000.0, None),
        (ClientLag(Spread(1.0, 51.0, 51.0), QUIET), 1000.0, "requests were sent 51 ms late (P99), where 50 ms"),
        (ClientLag(Spread(1.0, 51.0, 51.0), None), None, "requests were sent 51 ms late (P99), where 10 ms"),
    ],
)
def test_a_lag_is_too_large_above_10_ms_and_above_a_twentieth_of_the_median(
    lag: ClientLag, median_ms: float | None, reason: str | None
) -> None:
    found = too_late(lag, median_ms)
    assert found is None if reason is None else reason in (found or "")


def load_and_block(triton: FakeTriton, load: ClosedLoop | Replay) -> LoadReport:
    """Twenty requests, and the event loop stands still for 200 ms when the fifth has ended."""
    ended = []

    def on_end(record: object) -> None:
        ended.append(record)
        if len(ended) == 5:
            time.sleep(0.2)

    async def send() -> LoadReport:
        async with make_target("grpc", triton.url, "continuous") as target:
            return await run_load(target, make_workload("fixed:2,2", 20).requests, LoadOptions("r", load), [], on_end)

    return asyncio.run(send())


def test_a_generator_that_stands_still_is_found_out(triton: FakeTriton) -> None:
    report = load_and_block(triton, Replay(tuple(index * 0.02 for index in range(20))))
    assert report.lag.loop is not None
    assert report.lag.sending is not None
    # Of the requests that were due meanwhile the first was the latest, at most one gap less than the stop.
    assert report.lag.sending.max >= 150
    assert report.lag.loop.max >= 180
    assert "late (P99)" in (too_late(report.lag, 100.0) or "")


def test_in_a_closed_loop_it_shows_in_the_beat(triton: FakeTriton) -> None:
    report = load_and_block(triton, ClosedLoop(1))
    assert report.lag.loop is not None
    assert report.lag.loop.max >= 180
    assert "event loop" in (too_late(report.lag, 100.0) or "")
    assert report.processes == 1
    assert report.start_s < time.perf_counter()
