"""Servers under load, by what they speak."""

from __future__ import annotations

from collections.abc import Callable

from slipstream_client.errors import SlipstreamError
from slipstream_client.load.targets.generate_stream import GenerateStreamTarget
from slipstream_client.load.targets.grpc_target import GrpcTarget
from slipstream_client.load.targets.infer import InferTarget
from slipstream_client.load.targets.openai import OpenAiTarget
from slipstream_client.load.targets.target import LoadTarget

_TARGETS: dict[str, Callable[[str, str, float | None], LoadTarget]] = {
    "grpc": GrpcTarget,
    "generate_stream": GenerateStreamTarget,
    "infer": InferTarget,
    "openai": OpenAiTarget,
}
TARGETS = tuple(_TARGETS)


def make_target(spec: str, url: str, model: str, timeout_s: float | None = None) -> LoadTarget:
    """Make the target that `spec` names; `timeout_s` bounds each attempt at a request.

    Raises:
        SlipstreamError: there is no such target.
    """
    if spec not in _TARGETS:
        raise SlipstreamError(f"no target {spec!r}; there are {', '.join(TARGETS)}")
    return _TARGETS[spec](url, model, timeout_s)
