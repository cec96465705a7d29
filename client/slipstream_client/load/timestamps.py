"""Times as traces write them: seconds, or date and time of day."""

from __future__ import annotations

import contextlib
import math
import re

import numpy as np

from slipstream_client.load.source import refused

TIME_FIELDS = ("timestamp", "arrival")
_DATE_AND_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d(\.\d{1,9})?)(Z|\+00:00)?")


def seconds(place: str, field: str, value: object) -> float:
    """Seconds from zero, or from 1970 for a date and time of day.

    Raises:
        SlipstreamError: it is neither.
    """
    time = math.nan
    with contextlib.suppress(ValueError, OverflowError):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            time = float(value)
        elif isinstance(value, str):
            written = _DATE_AND_TIME.fullmatch(value.strip())
            time = _since_1970(f"{written[1]}T{written[2]}") if written else float(value)
    if not 0 <= time < math.inf:
        raise refused(
            place, field, value, "seconds from 0, or a date and time such as 2023-11-16 18:15:46.680590 (UTC)"
        )
    return time


def _since_1970(written: str) -> float:
    return float((np.datetime64(written, "ns") - np.datetime64(0, "ns")) / np.timedelta64(1, "s"))
