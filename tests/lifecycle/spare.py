"""The server that may be broken, and asking one that is about to refuse: what it says, and how soon."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest

from helpers import PROMPTS, Refused, ask
from slipstream_client.server.tritonserver import TritonServer

SPARE_SEATS = 4
SPARE_QUEUE = 4
# Some 500 responses with all alternatives of every token, more than any other test has.
SPARE_RESPONSE_BYTES = 2 << 20
# How soon a request must be refused that need not wait for anything.
AT_ONCE_S = 1.0


@dataclass(frozen=True)
class Spare:
    """A server whose engines may be killed and whose queue is short."""

    server: TritonServer
    first_start_s: float


def refusal(server: TritonServer, model: str, prompt: str = PROMPTS[0], **sampling: Any) -> Refused:
    """The error that ends a request."""
    with pytest.raises(Refused) as error:
        ask(server, model, prompt, **sampling)
    return error.value


def refused_at_once(server: TritonServer, model: str) -> tuple[str, str | None]:
    """Text and code of the error with which a model refuses a request now."""
    start = time.monotonic()
    refused = refusal(server, model, max_tokens=1)
    assert time.monotonic() - start < AT_ONCE_S
    return refused.text, refused.code
