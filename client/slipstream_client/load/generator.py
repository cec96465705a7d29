"""A closed loop of clients: each sends the next request of the workload as soon as its last one has ended."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from slipstream_client.aio import AsyncSlipstreamClient
from slipstream_client.load.records import RequestRecord
from slipstream_client.load.workload import WorkloadRequest
from slipstream_client.tensors import Generation, RequestFailed

RETRIED_CODE = "UNAVAILABLE"
_LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True)
class LoadOptions:
    """How the requests of one run are sent."""

    batcher: str
    concurrency: int
    executor: str = "native"
    retries: int = 0  # further attempts on UNAVAILABLE
    first_pause_s: float = 0.1  # before the first retry; doubles with each


async def run_load(
    client: AsyncSlipstreamClient,
    requests: Sequence[WorkloadRequest],
    options: LoadOptions,
    records: list[RequestRecord],
    on_end: Callable[[RequestRecord], None] = lambda record: None,
) -> None:
    """Send `requests` to the client's model, `options.concurrency` at a time, and append a record of each as it ends.

    Cancelling it cancels the requests in flight and leaves in `records` what has ended.
    """
    contract = await client.contract()
    run = _Run(client, options, records, on_end)
    concurrency = min(options.concurrency, len(requests))
    if contract.client_batches:
        batch_size = min(concurrency, contract.max_batch_size)
        batches = iter([requests[start : start + batch_size] for start in range(0, len(requests), batch_size)])
        workers = [run.send_batches(batches) for _ in range(math.ceil(concurrency / batch_size))]
    else:
        queue = iter(requests)
        send_one = run.stream if contract.decoupled else run.infer
        workers = [run.send_each(queue, send_one) for _ in range(concurrency)]
    await asyncio.gather(*workers)


class _Run:
    """The state that the workers of one run share: the clock's start and the records."""

    def __init__(
        self,
        client: AsyncSlipstreamClient,
        options: LoadOptions,
        records: list[RequestRecord],
        on_end: Callable[[RequestRecord], None],
    ) -> None:
        self._client = client
        self._options = options
        self._records = records
        self._on_end = on_end
        # So that no run finds in a prefix cache what the one before it has computed.
        self._cache_salt = secrets.token_hex(8)
        self._start = time.perf_counter()

    async def send_each(
        self,
        queue: Iterator[WorkloadRequest],
        send: Callable[[WorkloadRequest, RequestRecord], Awaitable[None]],
    ) -> None:
        """One client that sends one request at a time."""
        for request in queue:
            record = self._record(request)
            await self._attempt(lambda request=request, record=record: send(request, record), [record])  # type: ignore[misc]
            self._end(request, record)

    async def send_batches(self, batches: Iterator[Sequence[WorkloadRequest]]) -> None:
        """One client that sends one batch at a time."""
        for batch in batches:
            records = [self._record(request) for request in batch]
            await self._attempt(lambda batch=batch, records=records: self.infer_batch(batch, records), records)  # type: ignore[misc]
            for request, record in zip(batch, records, strict=True):
                self._end(request, record)

    async def stream(self, request: WorkloadRequest, record: RequestRecord) -> None:
        """One attempt that notes the time and the tokens of every chunk."""
        record.first, record.output_tokens = None, 0
        record.chunks.clear()
        chunks = self._client.stream(request.text, request_id=record.id, **self._sampling(request))
        async with aclosing(chunks):
            async for chunk in chunks:
                now = self._now()
                record.chunks.append((now, chunk.num_tokens))
                record.output_tokens += chunk.num_tokens
                if record.first is None and chunk.num_tokens:
                    record.first = now
                if chunk.final:
                    record.last = now
                    self._note(record, Generation.of_chunks([chunk]))

    async def infer(self, request: WorkloadRequest, record: RequestRecord) -> None:
        """One attempt against a model that answers all at once."""
        answer = await self._client.generate(request.text, request_id=record.id, **self._sampling(request))
        self._answered(record, self._now(), answer)

    async def infer_batch(self, batch: Sequence[WorkloadRequest], records: Sequence[RequestRecord]) -> None:
        """One attempt of a whole batch."""
        samplings = [self._sampling(request) for request in batch]
        answers = await self._client.generate_batch([request.text for request in batch], samplings, records[0].id)
        now = self._now()
        for record, answer in zip(records, answers, strict=True):
            self._answered(record, now, answer)

    def _sampling(self, request: WorkloadRequest) -> dict[str, Any]:
        return request.sampling() | {"cache_salt": self._cache_salt}

    def _now(self) -> float:
        return time.perf_counter() - self._start

    def _record(self, request: WorkloadRequest) -> RequestRecord:
        options = self._options
        return RequestRecord(
            id=f"{options.batcher}-c{options.concurrency}-{request.index:05d}",
            batcher=options.batcher,
            executor=options.executor,
            concurrency=options.concurrency,
            index=request.index,
            intended=self._now(),
        )

    async def _attempt(self, send: Callable[[], Awaitable[None]], records: Sequence[RequestRecord]) -> None:
        """Send until it works or the retries are used up; a failure is noted in every record."""
        sent = self._now()
        for record in records:
            record.sent = sent
        for attempt in range(self._options.retries + 1):
            try:
                return await send()
            except RequestFailed as error:
                if error.code == RETRIED_CODE and attempt < self._options.retries:
                    await asyncio.sleep(min(self._options.first_pause_s * 2**attempt, _LONGEST_PAUSE_S))
                    for record in records:
                        record.retries += 1
                    continue
                for record in records:
                    record.last, record.error, record.error_code = self._now(), error.text, error.code
                return None
        return None

    def _answered(self, record: RequestRecord, now: float, answer: Generation) -> None:
        record.last = now
        record.output_tokens = answer.num_output_tokens
        record.chunks = [(now, answer.num_output_tokens)]
        self._note(record, answer)

    def _note(self, record: RequestRecord, answer: Generation) -> None:
        record.input_tokens = answer.num_input_tokens
        record.finish_reason = answer.finish_reason
        record.output_ids = answer.output_ids
        # The ids have a field of their own.
        record.stats = {key: value for key, value in (answer.stats or {}).items() if key != "output_ids"} or None

    def _end(self, request: WorkloadRequest, record: RequestRecord) -> None:
        if record.error is None and request.stop_length and record.output_tokens != request.stop_length:
            record.error = f"the answer has {record.output_tokens} tokens where {request.stop_length} were asked for"
            record.error_code = "WRONG_LENGTH"
        inference_ms = (record.stats or {}).get("inference_ms")
        if record.error is None and inference_ms is not None:
            record.queue_ms = max(record.e2e_ms - inference_ms, 0.0)
        self._records.append(record)
        self._on_end(record)
