"""What all doors share: configuration, tokenizer, engine link, metrics, and reading a request's tensors."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import triton_python_backend_utils as pb_utils

from slipstream.config import EngineConfig, runtime_directory
from slipstream.doors.fields import Limits, RequestFields, parse_fields
from slipstream.doors.metrics import MetricsPublisher
from slipstream.doors.text import TextCodec
from slipstream.engine.link import EngineLink
from slipstream.engine.messages import NewRequest, Output, RequestStats, Update
from slipstream.engine.request import CANCELLED, INVALID, UNAVAILABLE
from slipstream.errors import Cancelled, InvalidRequest, Unavailable
from slipstream.models.store import resolve

# By their names in gRPC; what was not foreseen is INTERNAL.
_CODES: dict[type[Exception], str] = {
    InvalidRequest: "INVALID_ARGUMENT",
    Unavailable: "UNAVAILABLE",
    Cancelled: "CANCELLED",
}
# Where Triton has a name of its own.
_TRITON_CODES = {"INVALID_ARGUMENT": "INVALID_ARG"}
_ERRORS = {
    INVALID: InvalidRequest,
    UNAVAILABLE: Unavailable,
    CANCELLED: Cancelled,
}
# What the other policies take so that all batchers can be sent the same request (`stats` names it as ignored), and what
# changes an answer and is theirs not to give.
_IGNORED_BY_OTHERS = frozenset(["cache_salt"])
_REFUSED_BY_OTHERS = frozenset(
    [
        "include_stop_str_in_output",
        "logprobs",
        "messages",
        "n",
        "priority",
        "prompt_logprobs",
        "prompt_token_ids",
        "stop",
        "tenant",
        "timeout_ms",
    ]
)
# What the continuous policy takes and has no use for, by its queue order.
_UNUSED_BY_ORDER = {
    "fcfs": frozenset(["priority", "tenant"]),
    "priority": frozenset(["tenant"]),
    "fair": frozenset(["priority"]),
}
# Set by the server itself beside a client's parameters.
_SERVER_PARAMETERS = ("id",)


class Door:
    """Base of the Triton models: connects to its engine when it is loaded and leaves it when it is unloaded."""

    def initialize(self, args: dict[str, str]) -> None:
        """Connect to the engine, starting it if need be. An error here is the model's load error in Triton."""
        model_config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in model_config.get("parameters", {}).items()}
        config = EngineConfig.from_parameters({"name": args["model_name"], **parameters})
        self._config = config
        self._name = args["model_name"]
        self._folder = folder = resolve(config.model)
        batcher = config.policy
        if batcher == "lockstep":
            batcher = "dynamic" if "dynamic_batching" in model_config else "static"
        self._metrics = MetricsPublisher({"model": config.name, "version": args["model_version"], "batcher": batcher})
        # The stub's parent is tritonserver.
        self._link = EngineLink(config, runtime_directory(), self._on_update, self._on_down, server_pid=os.getppid())
        info = self._link.start()
        self._codec = TextCodec(folder, info.max_model_len)
        self._limits = Limits(
            info.max_model_len,
            info.vocab_size,
            ignored=_UNUSED_BY_ORDER[config.queue_order] if config.policy == "continuous" else _IGNORED_BY_OTHERS,
            refused=frozenset() if config.policy == "continuous" else _REFUSED_BY_OTHERS,
        )
        self._next_id = 0
        pb_utils.Logger.log_info(
            f"{self._name}: engine {info.engine!r} (pid {info.pid}) serves {info.model} on {info.device}, "
            f"{info.max_num_seqs} seats, {info.num_blocks} blocks of {info.block_size} tokens, "
            f"batch invariant: {info.batch_invariant}"
        )

    def is_ready(self) -> bool:
        """Whether the engine answers; servers that ask (2026 and later) report the model as not ready meanwhile."""
        return self._link.up

    def finalize(self) -> None:
        """Leave the engine and say so; Triton calls this after the last response has gone out."""
        # Its gauges first: once it has left, they are those of the door that leads next.
        self._metrics.close()
        self._link.close()
        pb_utils.Logger.log_info(f"{self._name}: has left its engine")

    def _on_update(self, update: Update) -> None:
        if update.stats is not None:
            self._metrics.publish(update.stats, update.published)
        for output in update.outputs:
            self._on_output(output)

    def _on_down(self, reason: str) -> None:
        self._metrics.engine_down()
        self._fail_all(reason)

    def _on_output(self, output: Output) -> None:
        raise NotImplementedError

    def _fail_all(self, reason: str) -> None:
        """Answer everything in flight with the reason why the engine is unavailable."""
        raise NotImplementedError

    def _read(
        self, prompt_ids: list[int], values: Mapping[str, Any], *, stream: bool
    ) -> tuple[NewRequest, RequestFields]:
        """A validated request for the engine, arriving now.

        Raises:
            InvalidRequest: names the field, the value and what is allowed.
        """
        if not prompt_ids:
            raise InvalidRequest("the prompt is empty; it needs at least one token")
        fields = parse_fields(values, len(prompt_ids), self._limits)
        if fields.bad_words:
            spellings = tuple(sequence for word in fields.bad_words for sequence in self._codec.encode_word(word))
            sampling = msgspec.structs.replace(fields.sampling, bad_sequences=fields.sampling.bad_sequences + spellings)
            fields = dataclasses.replace(fields, sampling=sampling)
        arrival_time = time.monotonic()
        id_, self._next_id = self._next_id, self._next_id + fields.sampling.n  # one for each choice
        new = NewRequest(
            id_,
            prompt_ids,
            fields.sampling,
            arrival_time,
            stream,
            cache_salt=fields.cache_salt,
            timeout_s=None if fields.timeout_ms is None else fields.timeout_ms / 1000,
            priority=fields.priority,
            tenant=fields.tenant,
        )
        return new, fields


def request_parameters(request: Any) -> dict[str, Any]:
    """A request's scalar parameters, without those that the server sets itself."""
    parameters = json.loads(request.parameters() or "{}")
    return {
        name: value
        for name, value in parameters.items()
        if name not in _SERVER_PARAMETERS and not name.startswith("triton_")
    }


def read_column(request: Any, name: str) -> list[Any] | None:
    """All elements of an input tensor as Python values, whatever its rank; None where the input is absent."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy().ravel().tolist()


def read_scalar(request: Any, name: str, default: Any = None) -> Any:
    """The one element of an input tensor, or `default` where the input is absent.

    Raises:
        InvalidRequest: the tensor has no element or several.
    """
    values = read_column(request, name)
    if values is None:
        return default
    if len(values) != 1:
        raise InvalidRequest(f"{name} has {len(values)} elements; exactly 1 is allowed")
    return values[0]


def text_tensor(name: str, values: list[str], shape: tuple[int, ...]) -> Any:
    """A BYTES tensor of UTF-8 text."""
    return pb_utils.Tensor(name, np.array([value.encode() for value in values], dtype=object).reshape(shape))


def count_tensor(name: str, values: list[int], shape: tuple[int, ...]) -> Any:
    """A UINT32 tensor."""
    return pb_utils.Tensor(name, np.array(values, dtype=np.uint32).reshape(shape))


def stats_json(
    stats: RequestStats | None,
    fields: RequestFields,
    num_input: int,
    output_ids: list[int],
    stop_string: str | None = None,
    batch_end_s: float | None = None,
) -> str:
    """The `stats` output of an ended request; times in milliseconds, but for when it arrived on the server's clock.

    `stop_reason` is the stop string or the one of `stop_token_ids` that has ended it, else null. `held_ms`, of a batch
    that ends as a whole, is from its own last token to the batch's end at `batch_end_s`.
    """
    if stats is None:
        return "{}"

    def milliseconds(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds * 1e3, 3)

    stop_token_id = output_ids[-1] if output_ids and output_ids[-1] in fields.sampling.stop_token_ids else None
    values: dict[str, Any] = {
        "arrival_s": round(stats.arrival_s, 6),
        "queue_ms": milliseconds(stats.queue_s),
        "first_token_ms": milliseconds(stats.first_token_s),
        "inference_ms": milliseconds(stats.inference_s),
        "num_input_tokens": num_input,
        "num_output_tokens": len(output_ids),
        "stop_reason": stop_token_id if stop_string is None else stop_string,
        "cached_tokens": stats.num_cached,
        "preemptions": stats.num_preemptions,
        "waited_for": msgspec.to_builtins(stats.waited),
    }
    if batch_end_s is not None:
        values["held_ms"] = milliseconds(batch_end_s - stats.end_s)
    if fields.ignored:
        values["ignored"] = fields.ignored
    if fields.return_token_ids:
        values["output_ids"] = output_ids
    return json.dumps(values)


def output_error(output: Output) -> Exception | None:
    """The error that an engine's answer stands for."""
    if output.error is None:
        return None
    return _ERRORS.get(output.error_kind or "", RuntimeError)(output.error)


def error_response(error: Exception) -> Any:
    """An inference response that carries an error with its status code.

    The text begins with the code as well: Triton keeps only the text of an error on a gRPC stream or of an event over
    HTTP, and answers every other error over HTTP with status 400.
    """
    code = _CODES.get(type(error), "INTERNAL")
    # Looked up here, since Triton fills its module in only after this one has been imported.
    triton_code = getattr(pb_utils.TritonError, _TRITON_CODES.get(code, code))
    text = f"{code}: {error}" if str(error) else f"{code}: {type(error).__name__}"
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, triton_code))
