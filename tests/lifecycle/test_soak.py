"""The soak run of `make soak`, for about a minute."""

from __future__ import annotations

import pytest

from helpers import PROMPTS
from soak import soak

pytestmark = pytest.mark.server


@pytest.mark.parametrize("queue_order", ["priority", "fair"])
def test_mixed_requests_at_a_pool_that_is_too_small_are_all_answered_and_leave_nothing_behind(queue_order: str) -> None:
    """ENG-13: `make soak` does the same with 64 streams at a time for ten minutes."""
    report = soak(queue_order, count=80, seconds=12, streams=24, prompts=PROMPTS[:2])
    assert report.failures == [], report.table()
