"""Whether Triton formed batches in a run that is to show its dynamic batcher; its own statistics must say so."""

from __future__ import annotations

from slipstream_client.report.series import Run, series_name, succeeded

DYNAMIC = "dynamic"


def mean_batch(run: Run) -> float | None:
    """Rows in a call of the model, on average, by Triton's statistics; None where the server did not say."""
    inferences, executions = run.get("triton_inferences"), run.get("triton_executions")
    return inferences / executions if inferences and executions else None


def batching_doubt(run: Run) -> str | None:
    """Why this run is no evidence about the dynamic batcher; None where it is, or is none of that batcher's.

    Requests that come one by one, from too few clients or behind too short a delay, are executed one by one.
    """
    if run["batcher"] != DYNAMIC or not succeeded(run):
        return None
    place = f"{series_name(run)} at concurrency {run['concurrency']}"
    batch = mean_batch(run)
    if batch is None:
        return f"{place}: whether Triton's dynamic batcher formed batches is not known, its statistics were not read"
    if batch > 1:
        return None
    return (
        f"{place}: Triton's dynamic batcher did not batch ({run['triton_inferences']} requests in "
        f"{run['triton_executions']} executions), so this shows nothing of dynamic batching"
    )
