"""What the statistics take from a run's records, and its figures had it met other requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recorded import record, samples
from slipstream_client.comparison.samples import figures_of_requests, run_samples

RUN: dict[str, Any] = {"variant": "continuous", "workload": "mixed", "point": "c2", "repeat": 1}
CLOSED = RUN | {"load": {"kind": "closed", "concurrency": 2}}


def test_samples_stand_in_the_order_of_the_workload_without_warm_up() -> None:
    taken = run_samples(
        CLOSED,
        [
            record(3, sent=2.0, intended=1.5, chunks=[(2.5, 1), (3.0, 4)]),
            record(2, sent=1.0, last=4.0, error="stalled", output_tokens=7),
            record(1, sent=0.5, chunks=[(1.5, 6)], streams=False),
            record(0, sent=0.0, chunks=[(9.0, 1)], phase="warm_up"),
        ],
    )
    assert (taken.variant, taken.workload, taken.point, taken.repeat) == ("continuous", "mixed", "c2", 1)
    assert (taken.closed, taken.window_s, taken.failures) == (True, 3.5, 1)
    assert taken.tokens.tolist() == [6, 0, 5]
    assert taken.flight_s == pytest.approx([1.0, 3.0, 1.0])
    assert taken.e2e_ms == pytest.approx([1000, np.nan, 1500], nan_ok=True)
    assert taken.ttft_ms == pytest.approx([np.nan, np.nan, 1000], nan_ok=True)


def test_a_load_by_rate_is_no_closed_loop() -> None:
    assert not run_samples(RUN | {"load": {"kind": "open", "rate": 2.0}}, []).closed


def test_all_requests_once_give_the_figures_of_the_run() -> None:
    run = samples("a", 0, [100, 200, 400], tokens=[5, 6, 9], window_s=4.0, ttft_ms=[10, 20, 60])
    figures = figures_of_requests(run, np.arange(3)[None])
    assert {metric: value.item() for metric, value in figures.items()} == {
        "output_tokens_per_s": 5.0,
        "e2e_mean_ms": pytest.approx(700 / 3),
        "e2e_p99_ms": pytest.approx(396.0),
        "ttft_mean_ms": pytest.approx(30.0),
        "ttft_p99_ms": pytest.approx(59.2),
    }


@pytest.mark.parametrize(("closed", "tokens_per_s"), [(True, [20.0, 20.0]), (False, [10.0, 30.0])])
def test_requests_bring_their_time_with_them_only_in_a_closed_loop(closed: bool, tokens_per_s: list[float]) -> None:
    run = samples("a", 0, [1000, 3000], tokens=[10, 30], window_s=2.0, closed=closed)
    figures = figures_of_requests(run, np.array([[0, 0], [1, 1]]))
    assert figures["output_tokens_per_s"] == pytest.approx(tokens_per_s)


def test_failed_requests_are_left_out_of_latencies_as_numpy_does() -> None:
    generator = np.random.default_rng(1)
    e2e = generator.lognormal(5, 1, 40)
    e2e[generator.choice(40, 12, replace=False)] = np.nan
    chosen = generator.integers(0, 40, (50, 40))
    figures = figures_of_requests(samples("a", 0, e2e), chosen)
    assert figures["e2e_mean_ms"] == pytest.approx(np.nanmean(e2e[chosen], axis=1))
    assert figures["e2e_p99_ms"] == pytest.approx(np.nanpercentile(e2e[chosen], 99, axis=1))


def test_what_is_not_there_is_not_a_number() -> None:
    for run in (samples("a", 0, []), samples("a", 0, [np.nan, np.nan], window_s=0.0)):
        figures = figures_of_requests(run, np.arange(len(run.tokens))[None])
        assert np.isnan([figures["e2e_mean_ms"].item(), figures["e2e_p99_ms"].item()]).all()
    half = figures_of_requests(samples("a", 0, [np.nan, 7.0]), np.array([[0, 0], [0, 1]]))
    assert half["e2e_p99_ms"] == pytest.approx([np.nan, 7.0], nan_ok=True)
    assert half["e2e_mean_ms"] == pytest.approx([np.nan, 7.0], nan_ok=True)
