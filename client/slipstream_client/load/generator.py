"""Sends a workload to a server: each request when its time has come and there is a place for it, and notes what came.

Places are what may be in flight at once. In a closed loop they are its clients, and a request's turn comes when one of
them becomes free. Otherwise turns are fixed in advance, and what waits for a place waits from its turn on: leaving that
out would make a server look the better the longer it stood still (coordinated omission).
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream_client.errors import SlipstreamError
from slipstream_client.load.arrivals import ClosedLoop, Load
from slipstream_client.load.lag import ClientLag, LagMeter
from slipstream_client.load.records import Phase, RequestRecord
from slipstream_client.load.targets.target import Attempt, LoadTarget
from slipstream_client.load.workload import WorkloadRequest
from slipstream_client.tensors import RequestFailed

RETRIED_CODE = "UNAVAILABLE"
_LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True)
class LoadOptions:
    """How the requests of one run are sent."""

    run: str  # its id, with which the ids of its requests begin
    load: Load
    warm_up: int = 0  # so many requests at the beginning are marked as such,
    cool_down: int = 0  # and so many at the end
    retries: int = 0  # further attempts on UNAVAILABLE
    first_pause_s: float = 0.1  # before the first retry; doubles with each
    seed: int = 0  # of the arrivals


@dataclass(frozen=True)
class LoadReport:
    """What a run says beside its records."""

    start_s: float  # time.perf_counter() at the run's time zero
    lag: ClientLag
    processes: int = 1  # that sent requests


async def run_load(
    target: LoadTarget,
    requests: Sequence[WorkloadRequest],
    options: LoadOptions,
    records: list[RequestRecord],
    on_end: Callable[[RequestRecord], None] = lambda record: None,
) -> LoadReport:
    """Send `requests` to a target that has been entered, and append a record of each as it ends.

    Where the client brings the batch, a place is a client that batches: in a closed loop it takes the next requests, in
    an open one those that have arrived. Cancelling it cancels the requests in flight and leaves in `records` what has
    ended.

    Raises:
        SlipstreamError: warm-up and cool-down leave nothing to measure.
    """
    if requests and options.warm_up + options.cool_down >= len(requests):
        raise SlipstreamError(
            f"warm_up {options.warm_up} and cool_down {options.cool_down} leave none of {len(requests)} requests; "
            f"together they may be {len(requests) - 1}"
        )
    return await _Run(target, requests, options, records, on_end).send_all()


class _Run:
    """The state of one run. Times are seconds from its start."""

    def __init__(
        self,
        target: LoadTarget,
        requests: Sequence[WorkloadRequest],
        options: LoadOptions,
        records: list[RequestRecord],
        on_end: Callable[[RequestRecord], None],
    ) -> None:
        self._target = target
        self._requests = requests
        self._options = options
        self._records = records
        self._on_end = on_end
        self._times = options.load.intended_times(len(requests), options.seed)
        self._cache_salt = secrets.token_hex(8)
        self._batch_size, self._num_places = _places(options.load, target.batch_size, len(requests))
        self._free: asyncio.Queue[float] = asyncio.Queue()  # since when each place that is free has been so
        self._meter = LagMeter()
        self._start = time.perf_counter()

    async def send_all(self) -> LoadReport:
        beat = asyncio.create_task(self._meter.beat())
        tasks: list[asyncio.Task[None]] = []
        try:
            self._open_places()
            await self._dispatch(tasks)
            await asyncio.gather(*tasks)
        finally:
            for task in (beat, *tasks):
                task.cancel()
            await asyncio.gather(beat, *tasks, return_exceptions=True)
        return LoadReport(self._start, self._meter.lag())

    def _open_places(self) -> None:
        """All at once, or evenly over the ramp of a closed loop."""
        load = self._options.load
        ramp_up_s = load.ramp_up_s if isinstance(load, ClosedLoop) else 0.0
        for place in range(self._num_places or 0):
            opens = ramp_up_s * place / (self._num_places or 1)
            if opens:
                asyncio.get_running_loop().call_later(opens, self._free.put_nowait, opens)
            else:
                self._free.put_nowait(opens)

    async def _dispatch(self, tasks: list[asyncio.Task[None]]) -> None:
        """Start a task for each request, or batch, as soon as it may be sent."""
        position = 0
        while position < len(self._requests):
            free_since = await self._free.get() if self._num_places else 0.0
            due = free_since if self._times is None else max(self._times[position], free_since)
            if (delay := due - self._now()) > 0:
                await asyncio.sleep(delay)
            end = min(position + self._batch_size, len(self._requests))
            if self._times is not None:
                now = self._now()
                end = next((later for later in range(position + 1, end) if self._times[later] > now), end)
            tasks.append(asyncio.create_task(self._serve(range(position, end), free_since, due)))
            position = end

    async def _serve(self, positions: range, free_since: float, due: float) -> None:
        """From the sending of one request, or batch, to its end."""
        batch = [self._requests[position] for position in positions]
        records = [self._record(position, free_since) for position in positions]
        try:
            sent = self._now()
            if self._times is not None:
                self._meter.note_sending(sent - due)
            for record in records:
                record.sent = sent
            await self._attempt(batch, records)
            for request, record in zip(batch, records, strict=True):
                self._end(request, record)
        finally:
            self._free.put_nowait(self._now())

    async def _attempt(self, batch: Sequence[WorkloadRequest], records: Sequence[RequestRecord]) -> None:
        """Send until it works or the retries are used up; a failure is noted in every record."""
        for retries in range(self._options.retries + 1):
            attempts = [
                Attempt(record.id, request, self._cache_salt) for request, record in zip(batch, records, strict=True)
            ]
            failure = None
            try:
                await self._target.send(attempts)
            except RequestFailed as error:
                failure = error
            if failure is None or failure.code != RETRIED_CODE or retries == self._options.retries:
                break
            await asyncio.sleep(min(self._options.first_pause_s * 2**retries, _LONGEST_PAUSE_S))
        for attempt, record in zip(attempts, records, strict=True):
            record.retries = retries
            self._fill(record, attempt, failure)

    def _fill(self, record: RequestRecord, attempt: Attempt, failure: RequestFailed | None) -> None:
        """What came of the last attempt."""
        record.chunks = [(at - self._start, tokens) for at, tokens in attempt.chunks]
        record.output_tokens = sum(tokens for _, tokens in attempt.chunks)
        if self._target.streams:
            record.first = next((at for at, tokens in record.chunks if tokens), None)
        record.input_tokens = attempt.input_tokens
        record.finish_reason = attempt.finish_reason
        record.output_ids = attempt.output_ids
        record.stats = attempt.stats
        record.last = record.chunks[-1][0] if record.chunks and failure is None else self._now()
        if failure is not None:
            record.error, record.error_code = failure.text, failure.code

    def _end(self, request: WorkloadRequest, record: RequestRecord) -> None:
        if record.error is None and not record.output_tokens:
            record.error, record.error_code = "the answer has no token", "EMPTY"
        elif record.error is None and request.stop_length and record.output_tokens != request.stop_length:
            record.error = f"the answer has {record.output_tokens} tokens where {request.stop_length} were asked for"
            record.error_code = "WRONG_LENGTH"
        self._records.append(record)
        self._on_end(record)

    def _record(self, position: int, free_since: float) -> RequestRecord:
        index = self._requests[position].index
        return RequestRecord(
            id=f"{self._options.run}/{index:05d}",
            run=self._options.run,
            index=index,
            intended=free_since if self._times is None else self._times[position],
            phase=self._phase(position),
        )

    def _phase(self, position: int) -> Phase:
        if position < self._options.warm_up:
            return "warm_up"
        return "cool_down" if position >= len(self._requests) - self._options.cool_down else "measured"

    def _now(self) -> float:
        return time.perf_counter() - self._start


def _places(load: Load, batch_size: int | None, count: int) -> tuple[int, int | None]:
    """Requests in a batch, and how many batches may be in flight at once (None: any number).

    `batch_size` is the target's. A client that batches stands for as many clients as its batch holds, and where nothing
    limits them there is one.
    """
    most = load.concurrency if isinstance(load, ClosedLoop) else load.max_concurrency
    if most is not None:
        most = max(1, min(most, count))
    if batch_size is None:
        return 1, most
    batch_size = min(batch_size, most or batch_size)
    return batch_size, math.ceil((most or 1) / batch_size)
