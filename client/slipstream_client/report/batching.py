"""Whether Triton formed batches where its dynamic batcher is to be shown; its own statistics must say so."""

from __future__ import annotations

from slipstream_client.report.study import Cell

DYNAMIC = "dynamic"


def mean_batch(cell: Cell) -> float | None:
    """Rows in a call of the model, on average, by Triton's statistics; None where the server did not say."""
    inferences, executions = cell.total("triton_inferences"), cell.total("triton_executions")
    return inferences / executions if inferences and executions else None


def batching_doubt(cell: Cell) -> str | None:
    """Why this cell is no evidence about the dynamic batcher; None where it is, or is none of that batcher's.

    Requests that come one by one, from too few clients or behind too short a delay, are executed one by one.
    """
    if not cell.runs[0]["model"].startswith(DYNAMIC) or not cell.succeeded:
        return None
    place = f"{cell.variant} at {cell.load.words} ({cell.workload})"
    batch = mean_batch(cell)
    if batch is None:
        return f"{place}: whether Triton's dynamic batcher formed batches is not known, its statistics were not read"
    if batch > 1:
        return None
    return (
        f"{place}: Triton's dynamic batcher did not batch ({cell.total('triton_inferences')} requests in "
        f"{cell.total('triton_executions')} executions), so this shows nothing of dynamic batching"
    )
