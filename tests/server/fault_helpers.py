"""Asking a server that is about to refuse: what it says, and with which code."""

from __future__ import annotations

import queue
import time
from typing import Any

import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from helpers import PROMPTS, Refused, inputs_for, sampling_json
from slipstream_client.server.tritonserver import TritonServer

# How soon a request must be refused that need not wait for anything.
AT_ONCE_S = 1.0
# With this header Triton closes a stream with an error's true status code instead of sending its text alone.
_WITH_CODE = {"triton_grpc_error": "true"}


def refusal(server: TritonServer, model: str, prompt: str = PROMPTS[0], **sampling: Any) -> Refused:
    """The error that ends a request of a model that streams, with its code."""
    ended: queue.SimpleQueue[InferenceServerException] = queue.SimpleQueue()

    def receive(result: triton_grpc.InferResult | None, error: InferenceServerException | None) -> None:
        if error is not None:
            ended.put(error)

    with triton_grpc.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(receive, headers=_WITH_CODE)
        client.async_stream_infer(model, inputs_for(model, prompt, sampling_json(**sampling)))
        error = ended.get(timeout=60)
    return Refused(error.message(), str(error.status()).removeprefix("StatusCode."))


def refused_at_once(server: TritonServer, model: str) -> tuple[str, str | None]:
    """Text and code of the error with which a model that streams refuses a request now."""
    start = time.monotonic()
    refused = refusal(server, model, max_tokens=1)
    assert time.monotonic() - start < AT_ONCE_S
    return refused.text, refused.code
