"""What a comparison will run, from the flags of the command line, and in which order."""

from __future__ import annotations

import math

import pytest

from slipstream_client.comparison.plan import ComparePlan, Point
from slipstream_client.comparison.points import VARIANCE_SWEEP, LoadFlags, WorkloadFlags, make_points
from slipstream_client.comparison.variants import parse_variant
from slipstream_client.errors import SlipstreamError
from slipstream_client.load.arrivals import ClosedLoop, OpenLoop
from slipstream_client.load.workload import make_workload


def plan(**changes: object) -> ComparePlan:
    workload = make_workload("fixed:3,4", 8)
    values = {
        "variants": tuple(map(parse_variant, ("static", "dynamic", "continuous"))),
        "points": (Point(workload, ClosedLoop(1), 4), Point(workload, ClosedLoop(2), 8)),
        "baseline": "dynamic",
    }
    return ComparePlan(**(values | changes))  # type: ignore[arg-type]


def test_variants_are_run_forth_and_back_at_each_point() -> None:
    assert [run.id for run in plan(repeats=3).runs()] == [
        f"{variant}/fixed:3,4/{point}/{repeat}"
        for point in ("c1", "c2")
        for repeat, order in enumerate(
            (
                ("static", "dynamic", "continuous"),
                ("continuous", "dynamic", "static"),
                ("static", "dynamic", "continuous"),
            ),
            start=1,
        )
        for variant in order
    ]


def test_a_point_has_the_first_requests_of_its_workload() -> None:
    small, large = plan().points
    assert [request.index for request in small.requests] == [0, 1, 2, 3]
    assert small.requests == large.requests[:4]
    assert [workload.name for workload in plan().workloads()] == ["fixed:3,4"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"baseline": "iterative"}, "the baseline is 'iterative'; allowed are static, dynamic, continuous"),
        ({"variants": (parse_variant("dynamic"), parse_variant("dynamic"))}, "the variant 'dynamic' is named twice"),
        ({"warm_up": 3, "cool_down": 1}, r"4 requests at c1 are all warm-up \(3\) or cool-down \(1\)"),
    ],
)
def test_a_plan_that_measures_nothing_is_refused(changes: dict[str, object], told: str) -> None:
    with pytest.raises(SlipstreamError, match=told):
        plan(**changes)


def test_a_closed_loop_is_asked_for_by_its_clients() -> None:
    assert LoadFlags().loads("1,4") == (ClosedLoop(1), ClosedLoop(4))
    assert LoadFlags(concurrency="2", ramp_up_s=3.0).loads("1,4") == (ClosedLoop(2, 3.0),)


def test_an_open_loop_is_asked_for_by_its_rate() -> None:
    flags = LoadFlags(request_rate="0.5,2", burstiness=0.25, max_concurrency=9)
    assert flags.loads("1") == (OpenLoop(0.5, 0.25, 0.0, 9), OpenLoop(2.0, 0.25, 0.0, 9))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (LoadFlags(concurrency="1", request_rate="1"), "--concurrency and --request-rate exclude each other"),
        (LoadFlags(request_rate="1", trace="x.csv"), "--request-rate and --trace exclude each other"),
        (LoadFlags(max_concurrency=3), "--max-concurrency bounds --request-rate or --trace"),
        (LoadFlags(burstiness=0.5), "--burstiness is of --request-rate"),
        (LoadFlags(concurrency="0"), "--concurrency"),
        (LoadFlags(concurrency=""), "--concurrency '' is no list of whole numbers"),
        (LoadFlags(request_rate="-1"), "--request-rate"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags: LoadFlags, told: str) -> None:
    with pytest.raises(SlipstreamError, match=told):
        flags.loads("1")


def test_every_workload_is_put_under_every_load() -> None:
    loads = LoadFlags(concurrency="1,4").loads("1")
    points = make_points(WorkloadFlags(["mixed", "fixed:3,4"]), loads, "5,7", 2)
    assert [(point.workload.name, point.load.label, point.num_requests) for point in points] == [
        ("mixed", "c1", 7),
        ("mixed", "c4", 9),
        ("fixed:3,4", "c1", 7),
        ("fixed:3,4", "c4", 9),
    ]
    assert points[0].workload is points[1].workload
    assert len(points[0].workload.requests) == 9


def test_counts_that_are_not_given_grow_with_the_load() -> None:
    def counts(flags: LoadFlags) -> list[int]:
        return [point.num_requests for point in make_points(WorkloadFlags(["fixed:1,1"]), flags.loads("1"), None, 0)]

    assert counts(LoadFlags(concurrency="1,4,16")) == [12, 24, 48]
    assert counts(LoadFlags(request_rate="0.1,2")) == [24, 60]
    assert counts(LoadFlags(request_rate="inf")) == [24]
    assert counts(LoadFlags(request_rate="1e308")) == [24]


def test_the_variance_sweep_keeps_the_mean_and_spreads_the_lengths() -> None:
    points = make_points(WorkloadFlags(["variance"]), LoadFlags(concurrency="4").loads("1"), "400", 0)
    assert [point.workload.name for point in points] == list(VARIANCE_SWEEP)
    outputs = [[request.stop_length for request in point.requests] for point in points]
    assert set(outputs[0]) == {48}
    spreads = [max(lengths) / min(lengths) for lengths in outputs]
    assert spreads == sorted(spreads)
    assert all(math.isclose(sum(lengths) / 400, 48, rel_tol=0.25) for lengths in outputs)


def test_as_many_counts_as_loads_are_needed() -> None:
    loads = LoadFlags(concurrency="1,2").loads("1")
    with pytest.raises(SlipstreamError, match="--requests has 3 numbers for 2 loads"):
        make_points(WorkloadFlags(["mixed"]), loads, "1,2,3", 0)
    with pytest.raises(SlipstreamError, match="--requests 'x' is no list of whole numbers"):
        make_points(WorkloadFlags(["mixed"]), loads, "x", 0)
