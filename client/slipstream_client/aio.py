"""The asyncio twin of `SlipstreamClient`: one gRPC stream a request, so that cancelling a task cancels exactly it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from slipstream_client.tensors import (
    CHANNEL_OPTIONS,
    Chunk,
    Generation,
    ModelContract,
    RequestFailed,
    SamplingOptions,
    failure_of,
    parse_rows,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

_CANCELLED_HERE = "Locally cancelled by application!"  # what grpc.aio gives as the details of a call it cancelled


class AsyncSlipstreamClient:
    """One model of one server, for one event loop.

    `timeout_s` bounds each request from sending to its last response; one that takes longer fails as DEADLINE_EXCEEDED.
    Leave an iterator of `stream` early under `contextlib.aclosing`, so that the request ends at once.
    """

    def __init__(
        self, url: str = "127.0.0.1:8001", model: str = "continuous", *, timeout_s: float | None = None
    ) -> None:
        self.url = url
        self.model = model
        self._timeout_s = timeout_s
        self._channel = grpc.aio.insecure_channel(url, options=CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._contract: ModelContract | None = None

    async def contract(self) -> ModelContract:
        """The model's contract, asked of the server once."""
        if self._contract is None:
            try:
                answer = await self._stub.ModelConfig(service_pb2.ModelConfigRequest(name=self.model))
            except grpc.RpcError as error:
                raise failure_of(error, self.url) from error
            self._contract = ModelContract.of_config(answer.config)
        return self._contract

    async def generate(
        self,
        prompt: str | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        request_id: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Generation:
        """Return the whole answer to a prompt or to token ids.

        Raises:
            RequestFailed: the server refused the request or ended it early.
        """
        chunks = self._send(prompt, input_ids, request_id, sampling, stream=False)
        return Generation.of_chunks([chunk async for chunk in chunks])

    def stream(
        self,
        prompt: str | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        request_id: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncGenerator[Chunk, None]:
        """Iterate over the chunks of an answer; a model that does not stream gives one.

        Raises:
            RequestFailed: from the iterator, as in `generate`.
        """
        return self._send(prompt, input_ids, request_id, sampling, stream=True)

    async def generate_batch(
        self, prompts: Sequence[str], samplings: Sequence[Mapping[str, Any]], request_id: str | None = None
    ) -> list[Generation]:
        """Send n prompts as one request to a model whose client brings the batch; returns n answers in that order.

        Raises:
            RequestFailed: the server refused the batch or ended it early.
        """
        contract = await self.contract()
        response = await self._infer(contract.batch_request(request_id or uuid.uuid4().hex, prompts, samplings))
        return [Generation.of_chunks([row]) for row in parse_rows(response)]

    async def close(self) -> None:
        """End the connection; the server cancels what still runs on it."""
        await self._channel.close()

    async def __aenter__(self) -> AsyncSlipstreamClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _send(
        self,
        prompt: str | None,
        input_ids: Sequence[int] | None,
        request_id: str | None,
        sampling: SamplingOptions,
        *,
        stream: bool,
    ) -> AsyncGenerator[Chunk, None]:
        contract = await self.contract()
        request = contract.request(request_id or uuid.uuid4().hex, prompt, input_ids, sampling, stream=stream)
        if not contract.decoupled:
            for chunk in parse_rows(await self._infer(request)):
                yield chunk
            return
        call = self._stub.ModelStreamInfer(iter([request]), timeout=self._timeout_s)
        ended, failure = False, None
        try:
            # To the end of the stream, not only of the answer: see `tensors.is_final`.
            async for message in call:
                if message.error_message:
                    ended, failure = True, RequestFailed(message.error_message)
                    continue
                for chunk in parse_rows(message.infer_response):
                    ended = chunk.final
                    yield chunk
        except (grpc.RpcError, asyncio.CancelledError) as error:
            if not (ended and isinstance(error, grpc.RpcError)):
                await self._raise(error, call)
        finally:
            call.cancel()
        if failure is not None:
            raise failure
        if not ended:
            raise RequestFailed("the server closed the stream before the last response", "UNAVAILABLE")

    async def _infer(self, request: service_pb2.ModelInferRequest) -> service_pb2.ModelInferResponse:
        call = self._stub.ModelInfer(request, timeout=self._timeout_s)
        try:
            return await call
        except (grpc.RpcError, asyncio.CancelledError) as error:
            await self._raise(error, call)

    async def _raise(self, error: BaseException, call: Any) -> NoReturn:
        if isinstance(error, grpc.RpcError):
            raise failure_of(error, self.url) from error
        # grpc.aio raises CancelledError both for a cancelled task and for a call that the server ended as CANCELLED;
        # in the second case the call has ended and carries the server's text.
        if call.done() and (details := await call.details()) != _CANCELLED_HERE:
            raise RequestFailed(details or "the request was cancelled", "CANCELLED") from error
        raise error
