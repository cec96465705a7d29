"""Everything that a comparison's runs say together: figures with intervals, noise, differences and knees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream_client.comparison.differences import compare
from slipstream_client.comparison.intervals import point_intervals
from slipstream_client.comparison.knees import knees
from slipstream_client.comparison.noise import measure_noise
from slipstream_client.comparison.resampling import resample_points
from slipstream_client.comparison.samples import run_samples
from slipstream_client.load.records import RequestRecord


def summarise_runs(
    runs: Sequence[Mapping[str, Any]],
    records: Mapping[str, Sequence[RequestRecord]],
    baseline: str,
    slo: str | None = None,
    *,
    seed: int = 0,
) -> dict[str, Any]:
    """The parts of results.json that follow from its "runs" and their records by run; the same for the same seed.

    A run that is not valid counts in none of them.
    """
    valid = [run for run in runs if run.get("valid", True)]
    points = resample_points([run_samples(run, records[run["id"]]) for run in valid], seed=seed)
    noise = measure_noise(points)
    return {
        "intervals": point_intervals(points, noise, seed=seed),
        "noise": noise.as_results(),
        "comparisons": compare(points, baseline, noise, seed=seed),
        "knees": knees(valid, slo, seed=seed),
    }
