"""Intended times: by hand where there is no chance in them, by their statistics where there is."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from slipstream_client.errors import SlipstreamError
from slipstream_client.load.arrivals import ClosedLoop, OpenLoop, Replay, offered_sha256
from slipstream_client.load.workload import make_workload


def gaps(load: OpenLoop, count: int, seed: int = 0) -> np.ndarray:
    return np.diff([0.0, *load.intended_times(count, seed)])


def test_constant_gaps_are_a_metronome() -> None:
    load = OpenLoop(4, burstiness=math.inf)
    assert load.intended_times(5, seed=1) == [0.25, 0.5, 0.75, 1.0, 1.25]
    assert load.intended_times(5, seed=2) == load.intended_times(5, seed=1)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert OpenLoop(math.inf).intended_times(3, seed=0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.001, 0.25, 1.0, 4.0, math.inf])
@pytest.mark.parametrize("count", [1, 7, 500])
def test_the_last_of_n_requests_arrives_after_n_by_rate(burstiness: float, count: int) -> None:
    times = OpenLoop(2.5, burstiness).intended_times(count, seed=3)
    assert len(times) == count
    assert times[-1] == pytest.approx(count / 2.5, abs=1e-6)
    assert times[0] >= 0
    assert times == sorted(times)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("burstiness", [0.25, 0.84, 1.0, 4.0, 25.0])
def test_gaps_have_the_coefficient_of_variation_of_the_burstiness(burstiness: float, seed: int) -> None:
    drawn = gaps(OpenLoop(5, burstiness), 40_000, seed)
    assert drawn.mean() == pytest.approx(0.2)
    assert drawn.std() / drawn.mean() == pytest.approx(burstiness**-0.5, rel=0.03)


def test_gaps_of_a_poisson_process_are_exponential() -> None:
    drawn = gaps(OpenLoop(5), 40_000)
    for mean_gaps in (0.1, 0.5, 1, 2, 4):
        assert np.mean(drawn > 0.2 * mean_gaps) == pytest.approx(math.exp(-mean_gaps), abs=0.008)
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.02


def test_times_depend_on_the_seed_and_scale_with_the_rate() -> None:
    times = OpenLoop(1, burstiness=0.5).intended_times(20, seed=0)
    assert OpenLoop(1, burstiness=0.5).intended_times(20, seed=1) != times
    assert OpenLoop(4, burstiness=0.5).intended_times(20, seed=0) == pytest.approx([t / 4 for t in times], abs=1e-6)


def test_times_are_the_same_for_ever() -> None:
    assert OpenLoop(2).intended_times(4, seed=0) == FIRST_TIMES


FIRST_TIMES = [0.992112, 1.058642, 1.951031, 2.0]


def test_during_a_ramp_the_rate_grows_linearly_from_zero() -> None:
    # At time t of the ramp t^2 / 4 requests are due, so the k-th at 2 sqrt(k): four in the ramp, then two a second.
    times = OpenLoop(2, burstiness=math.inf, ramp_up_s=4).intended_times(6, seed=0)
    assert times == [2.0, 2.828427, 3.464102, 4.0, 4.5, 5.0]


def test_after_a_ramp_everything_comes_half_a_ramp_later() -> None:
    plain = np.array(OpenLoop(10).intended_times(2000, seed=5))
    ramped = np.array(OpenLoop(10, ramp_up_s=60).intended_times(2000, seed=5))
    late = plain > 30
    assert ramped[late] == pytest.approx(plain[late] + 30, abs=2e-6)
    # While the rate grows to 10 a second: 300 requests, a quarter of them in the first half.
    assert np.sum(ramped <= 60) == pytest.approx(300, rel=0.1)
    assert np.sum(ramped <= 30) == pytest.approx(75, rel=0.2)
    assert ramped[-1] == pytest.approx(230, abs=1e-5)


def test_a_closed_loop_has_no_times_of_its_own() -> None:
    assert ClosedLoop(4).intended_times(8, 0) is None  # type: ignore[func-returns-value]


def test_a_replay_repeats_the_trace_at_its_speed() -> None:
    load = Replay((0.0, 1.0, 1.0, 4.5), speed=2)
    assert load.intended_times(4, seed=0) == [0.0, 0.5, 0.5, 2.25]
    assert load.intended_times(2, seed=9) == [0.0, 0.5]
    with pytest.raises(SlipstreamError, match="the trace has 4 arrivals where 5 are asked for"):
        load.intended_times(5, seed=0)


@pytest.mark.parametrize(
    ("load", "label", "described"),
    [
        (ClosedLoop(16), "c16", {"kind": "closed", "concurrency": 16, "ramp_up_s": 0.0}),
        (
            OpenLoop(2.5, ramp_up_s=3, max_concurrency=9),
            "r2.5",
            {"kind": "open", "rate": 2.5, "burstiness": 1.0, "ramp_up_s": 3, "max_concurrency": 9},
        ),
        (
            OpenLoop(math.inf, math.inf),
            "rinfbinf",
            {"kind": "open", "rate": "inf", "burstiness": "inf", "ramp_up_s": 0.0, "max_concurrency": None},
        ),
        (
            OpenLoop(4, 0.5),
            "r4b0.5",
            {"kind": "open", "rate": 4, "burstiness": 0.5, "ramp_up_s": 0.0, "max_concurrency": None},
        ),
        (
            Replay((0.0, 5.0), file="trace.csv"),
            "trace",
            {
                "kind": "trace",
                "file": "trace.csv",
                "arrivals": 2,
                "duration_s": 5.0,
                "speed": 1.0,
                "max_concurrency": None,
            },
        ),
        (
            Replay((0.0, 5.0), speed=2.5, max_concurrency=3),
            "trace-x2.5",
            {"kind": "trace", "file": "", "arrivals": 2, "duration_s": 2.0, "speed": 2.5, "max_concurrency": 3},
        ),
    ],
)
def test_label_and_description(load: ClosedLoop | OpenLoop | Replay, label: str, described: dict[str, Any]) -> None:
    assert load.label == label
    assert load.describe() == described
    assert json.loads(json.dumps(described, allow_nan=False)) == described


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (ClosedLoop, {"concurrency": 0}, "closed loop: concurrency is 0; allowed: whole numbers from 1 to 65536"),
        (ClosedLoop, {"concurrency": 1, "ramp_up_s": -1}, "closed loop: ramp_up_s is -1; allowed: numbers from 0"),
        (OpenLoop, {"rate": 0}, "open loop: rate is 0; allowed: numbers from 1e-06 to inf"),
        (OpenLoop, {"rate": math.nan}, "rate is nan"),
        (OpenLoop, {"rate": 1, "burstiness": 0}, "burstiness is 0; allowed: numbers from 0.001 to inf"),
        (OpenLoop, {"rate": math.inf, "ramp_up_s": 1}, "ramp_up_s is 1; allowed: 0, as the rate is infinite"),
        (OpenLoop, {"rate": 1, "max_concurrency": 0}, "max_concurrency is 0; allowed: whole numbers from 1"),
        (Replay, {"times": ()}, "replay: times must ascend from 0"),
        (Replay, {"times": (1.0,)}, "replay: times must ascend from 0"),
        (Replay, {"times": (0.0, 2.0, 1.0)}, "replay: times must ascend from 0"),
        (Replay, {"times": (0.0, math.nan)}, "replay: times must ascend from 0"),
        (Replay, {"times": (0.0,), "speed": 0}, "replay: speed is 0; allowed: numbers from 1e-06"),
    ],
)
def test_loads_that_are_none_cannot_be_built(kind: type, values: dict[str, Any], message: str) -> None:
    with pytest.raises(SlipstreamError, match=re.escape(message)):
        kind(**values)


def test_the_hash_of_what_is_offered_covers_texts_lengths_limits_and_times() -> None:
    workload = make_workload("fixed:2,3", 2)
    assert offered_sha256(workload.requests) == workload.sha256
    lines = [
        json.dumps(asdict(request) | {"intended": time}, sort_keys=True) + "\n"
        for request, time in zip(workload.requests, (0.5, 1.25), strict=True)
    ]
    offered = offered_sha256(workload.requests, [0.5, 1.25])
    assert offered == hashlib.sha256("".join(lines).encode()).hexdigest()
    others = [
        offered_sha256(workload.requests, [0.5, 1.5]),
        offered_sha256(make_workload("fixed:2,4", 2).requests, [0.5, 1.25]),
        offered_sha256(make_workload("fixed:3,3", 2).requests, [0.5, 1.25]),
        offered_sha256(make_workload("fixed:2,3", 2, max_output=300).requests, [0.5, 1.25]),
        offered_sha256(make_workload("fixed:2,3", 2, seed=1).requests, [0.5, 1.25]),
    ]
    assert len({offered, *others}) == 6
