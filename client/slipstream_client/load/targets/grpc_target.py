"""One of our models over gRPC: streamed, plain inference, or a batch that the client brings, as its contract says."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from slipstream_client.aio import AsyncSlipstreamClient
from slipstream_client.load.targets.target import Attempt
from slipstream_client.tensors import ModelContract


class GrpcTarget:
    """Requests share one channel; each stream has one request."""

    def __init__(self, url: str, model: str, timeout_s: float | None = None) -> None:
        self._client = AsyncSlipstreamClient(url, model, timeout_s=timeout_s)
        self._contract: ModelContract

    @property
    def streams(self) -> bool:
        return self._contract.decoupled

    @property
    def batch_size(self) -> int | None:
        return self._contract.max_batch_size if self._contract.client_batches else None

    async def send(self, attempts: Sequence[Attempt]) -> None:
        if self._contract.client_batches:
            texts = [attempt.request.text for attempt in attempts]
            samplings = [attempt.sampling() for attempt in attempts]
            answers = await self._client.generate_batch(texts, samplings, attempts[0].id)
            now = time.perf_counter()
            for attempt, answer in zip(attempts, answers, strict=True):
                attempt.note(now, answer.num_output_tokens, answer)
            return
        (attempt,) = attempts
        chunks = self._client.stream(attempt.request.text, request_id=attempt.id, **attempt.sampling())
        async with aclosing(chunks):
            async for chunk in chunks:
                attempt.note(time.perf_counter(), chunk.num_tokens, chunk)

    def describe(self) -> dict[str, Any]:
        how = "stream" if self.streams else "batch" if self.batch_size else "infer"
        return {"target": "grpc", "how": how, "url": self._client.url, "model": self._client.model}

    async def __aenter__(self) -> GrpcTarget:
        try:
            self._contract = await self._client.contract()
        except BaseException:
            await self._client.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()
