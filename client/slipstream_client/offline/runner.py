"""Sends the requests of a batch, so many at a time, each until it has an answer or has failed for good."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from slipstream_client.aio import AsyncSlipstreamClient
from slipstream_client.offline.lines import BatchRequest
from slipstream_client.tensors import Generation, RequestFailed, ServerUnreachable

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
# What another attempt may mend: the server is full, gone, starting again, or was too slow; and what it said without a
# code, as Triton does of a model that is being loaded.
RETRIED_CODES = frozenset(["UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "ABORTED", "RESOURCE_EXHAUSTED", "UNKNOWN"])

Outcome = Generation | RequestFailed


@dataclass(frozen=True)
class BatchOptions:
    """How the requests of a batch are sent."""

    concurrency: int
    retries: int  # further attempts of a request that failed with one of RETRIED_CODES
    first_pause_s: float = FIRST_PAUSE_S  # before the first retry; doubles with each up to LONGEST_PAUSE_S


@dataclass(frozen=True, slots=True)
class Attempt:
    """One sending of one request; times are seconds since 1970."""

    request: BatchRequest
    number: int  # from 1 on
    started: float
    ended: float
    outcome: Outcome

    def as_log_line(self) -> dict[str, Any]:
        answer = self.outcome if isinstance(self.outcome, Generation) else None
        return {
            "id": self.request.id,
            "attempt": self.number,
            "started": round(self.started, 3),
            "ended": round(self.ended, 3),
            "duration_s": round(self.ended - self.started, 3),
            "num_input_tokens": answer and answer.num_input_tokens,
            "num_output_tokens": answer and sum(each.num_output_tokens for each in (answer, *answer.others)),
            "error_code": None if isinstance(self.outcome, Generation) else self.outcome.code,
        }


class BatchRunner:
    """Sends requests to one model and hands on what came of them.

    Args:
        on_attempt: is told of every attempt, also of those that are tried again or were cancelled.
        on_end: is told of every request once, when it has an answer or has failed for good.
        check_server: raises where waiting for the server is in vain.
    """

    def __init__(
        self,
        client: AsyncSlipstreamClient,
        options: BatchOptions,
        on_attempt: Callable[[Attempt], None],
        on_end: Callable[[BatchRequest, Outcome], None],
        check_server: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._options = options
        self._on_attempt = on_attempt
        self._on_end = on_end
        self._check_server = check_server
        self._random = random.Random()

    async def run(self, requests: Iterable[BatchRequest]) -> None:
        """Send them all. Cancelling it cancels the requests in flight.

        Raises:
            ServerUnreachable: nobody answers any more; the rest was not sent.
        SlipstreamError: what came cannot be kept.
        """
        contract = await self._client.contract()
        rows = min(self._options.concurrency, contract.max_batch_size) if contract.client_batches else 1
        groups = _in_groups(requests, rows)
        workers = [asyncio.create_task(self._work(groups)) for _ in range(math.ceil(self._options.concurrency / rows))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, groups: Iterator[list[BatchRequest]]) -> None:
        for group in groups:
            await self._answer(group)

    async def _answer(self, group: list[BatchRequest], number: int = 1) -> None:
        """Send a group as one request until it is answered or its retries are used up, with attempt `number` first."""
        while True:
            outcomes = await self._attempt(group, number)
            failure = outcomes[0] if isinstance(outcomes[0], RequestFailed) else None
            if failure is None or (failure.code not in RETRIED_CODES and len(group) == 1):
                break
            if failure.code not in RETRIED_CODES:  # one row is to blame, and the others are good without it
                for request in group:
                    await self._answer([request], number + 1)
                return
            self._check_server()
            if number > self._options.retries:
                if isinstance(failure, ServerUnreachable):  # the others would only come to the same end
                    raise failure
                break
            await asyncio.sleep(self._pause_s(number))
            number += 1
        for request, outcome in zip(group, outcomes, strict=True):
            self._on_end(request, outcome)

    async def _attempt(self, group: list[BatchRequest], number: int) -> Sequence[Outcome]:
        started = time.time()
        outcomes: Sequence[Outcome]
        try:
            outcomes = await self._send(group)
        except RequestFailed as error:
            outcomes = [error] * len(group)
        except asyncio.CancelledError:
            self._note(group, number, started, [RequestFailed("cancelled here", "CANCELLED")] * len(group))
            raise
        self._note(group, number, started, outcomes)
        return outcomes

    def _note(self, group: list[BatchRequest], number: int, started: float, outcomes: Sequence[Outcome]) -> None:
        ended = time.time()
        for request, outcome in zip(group, outcomes, strict=True):
            self._on_attempt(Attempt(request, number, started, ended, outcome))

    async def _send(self, group: list[BatchRequest]) -> Sequence[Outcome]:
        first = group[0]
        contract = await self._client.contract()
        if contract.client_batches:
            prompts = [request.prompt or "" for request in group]
            return await self._client.generate_batch(prompts, [request.sampling for request in group], first.id)
        sampling: Any = first.sampling
        return [await self._client.generate(first.prompt, input_ids=first.input_ids, request_id=first.id, **sampling)]

    def _pause_s(self, number: int) -> float:
        """Between half and all of a pause that doubles, so that those who failed together do not come back together."""
        longest = min(self._options.first_pause_s * 2 ** (number - 1), LONGEST_PAUSE_S)
        return longest * self._random.uniform(0.5, 1.0)


def _in_groups(requests: Iterable[BatchRequest], size: int) -> Iterator[list[BatchRequest]]:
    iterator = iter(requests)
    while group := list(islice(iterator, size)):
        yield group
