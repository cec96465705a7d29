"""A soak run's verdict names everything that is not as it must be, and nothing else."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from soak_report import Ended, Idle, Report
from soak_requests import REFUSED, SHARES, make_requests

ENGINE = ("engine", 7)
IDLE = Idle(
    resident={ENGINE: 1_000_000},
    finished={"stop": 5},
    preemptions=2,
    blocks_used=0,
    blocks_cached=3,
    blocks_total=10,
    gauges={"requests_running": 0.0},
    tracebacks=0,
)
REQUESTS = make_requests(4, seed=0)
OUTCOMES = ("stop", "stop", "cancelled", REFUSED)


def report(ended: list[Ended] | None = None, half: Idle = IDLE, **at_end: Any) -> Report:
    """Of four requests that all went well, but for what is given."""
    end = replace(IDLE, **{"finished": {"stop": 7, "cancelled": 1}, "preemptions": 3, **at_end})
    all_well = [Ended(request, outcome) for request, outcome in zip(REQUESTS, OUTCOMES, strict=True)]
    return Report("fair", 4, 1.0, all_well if ended is None else ended, IDLE, half, end)


def test_a_run_without_fault_has_no_failures() -> None:
    assert report().failures == []
    assert report(resident={ENGINE: 1_019_999}).failures == []
    assert report().table().endswith("\npassed")


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (report(resident={ENGINE: 1_020_000}), "engine grew by 0.02 MB in the second half of the run"),
        (report(resident={("engine", 8): 1_000_000}), "other processes at the end: [('engine', 8)] instead of"),
        (report(blocks_used=1), "at rest 1 blocks are used and 3 cached"),
        (report(gauges={"requests_running": 1.0}), "at rest gauges are not 0: {'requests_running': 1.0}"),
        (report(preemptions=2), "nothing was preempted, so the pool was not short"),
        (report(tracebacks=1), "1 tracebacks in the server's log"),
        (report(finished={"stop": 8, "cancelled": 1}), "the engine counted {'stop': 3, 'cancelled': 1}, the clients"),
    ],
)
def test_what_a_server_still_holds_or_has_lost_fails(run: Report, says: str) -> None:
    (failure,) = run.failures
    assert failure.startswith(says)
    assert f"FAILED: 1\n  {says}" in run.table()


def test_a_wrong_answer_a_missing_one_and_one_that_came_twice_fail() -> None:
    well = report().ended
    wrong = report([Ended(REQUESTS[0], "wrong", "AssertionError: other tokens"), *well[1:]])
    assert any("other tokens" in failure for failure in wrong.failures)
    assert "3 requests of 4 have ended, 3 times in all" in report(well[:3]).failures
    assert "4 requests of 4 have ended, 5 times in all" in report([*well, well[3]]).failures


def test_requests_are_drawn_by_the_seed_alone_and_have_every_kind() -> None:
    one_round = sum(SHARES.values())
    assert make_requests(one_round, seed=5) == make_requests(one_round, seed=5) != make_requests(one_round, seed=6)
    assert Counter(request.kind for request in make_requests(one_round, seed=5)) == Counter(SHARES)
