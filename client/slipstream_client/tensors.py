"""The tensors of every door, on the wire: the one module that knows a door's inputs and outputs over gRPC.

Three families of doors exist (shapes in brackets):

* `continuous`: decoupled, no batch dimension, every input optional and [1] (`input_ids` [-1]).
* `continuous_unary`: the same tensors without `stream`, one response by plain inference.
* `static`, `dynamic`, `iterative`: a batch dimension, exactly `text_input` [n, 1] and `sampling_parameters` [n, 1].

A `ModelContract`, read once from the server's model configuration, says which family a model belongs to.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypedDict

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from slipstream_client.errors import SlipstreamError

_RETURN_FLAGS = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens", "return_stats")
_BYTES_LENGTH = struct.Struct("<I")
# What gRPC says, and no server, of a call whose connection ended before anything came.
_LOST_CONNECTION = "Internal error from Core"
# Of a client's channel: gRPC's own limit of 4 MiB is a few thousand tokens with log-probabilities, and its own pauses
# before it looks for a server that went grow to two minutes.
CHANNEL_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_reconnect_backoff_ms", 5000))


class RequestFailed(SlipstreamError):
    """One request was refused or ended early; `text` is the server's, of which the message has the first line.

    `code` is the gRPC name of the status (`INVALID_ARGUMENT`, `UNAVAILABLE`, `CANCELLED`, `INTERNAL`, ...). Our models
    begin their texts with it, because Triton drops the status of a streamed error; it is `UNKNOWN` where the server
    sent another text alone. (Triton's header `triton_grpc_error` is no way out: 24.10 then crashes now and then.)
    """

    def __init__(self, text: str, code: str = "UNKNOWN") -> None:
        stated, separator, rest = text.partition(": ")
        if separator and stated in grpc.StatusCode.__members__:
            text, code = rest, stated
        # Below the first line stands a Python traceback where a door failed in a way it did not foresee.
        line = text.strip().partition("\n")[0]
        super().__init__(line if code == "UNKNOWN" else f"{line} ({code})")
        self.text = text
        self.code = code


class ServerUnreachable(RequestFailed):
    """No server answers at the address."""


class SamplingOptions(TypedDict, total=False):
    """Keys of `sampling_parameters`; one left out takes the server's default."""

    messages: list[dict[str, str]]  # in the place of a prompt, as is `prompt_token_ids`
    prompt_token_ids: list[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: dict[str, float]
    allowed_token_ids: list[int]
    bad_token_ids: list[int]
    bad_words: str | list[str]
    min_tokens: int
    stop: str | list[str]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    ignore_eos: bool
    stop_token_ids: list[int]
    stop_length: int
    n: int
    logprobs: int
    prompt_logprobs: int
    timeout_ms: float
    priority: int
    tenant: str
    cache_salt: str
    return_token_ids: bool


# A token and the likeliest in its place, by token id: logprob, rank, decoded_token and bytes of each; the token first.
Logprobs = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One response of a request, or one choice's part of it."""

    text: str
    num_tokens: int  # output tokens that this chunk carries; may be none or several
    finish_reason: str | None  # None until the last chunk
    stats: dict[str, Any] | None  # None until the last chunk
    num_input_tokens: int | None
    final: bool
    choice: int = 0  # which of the answers it belongs to, where n > 1
    logprobs: list[Logprobs] | None = None  # one for each token of the chunk, where `logprobs` asked for them
    prompt_logprobs: list[Logprobs | None] | None = None  # with the first chunk; None for the first token


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole answer; with n > 1 the first one, and the others in order."""

    text: str
    finish_reason: str | None
    num_input_tokens: int | None
    num_output_tokens: int
    output_ids: list[int] | None  # only where `return_token_ids` asked for them
    stats: dict[str, Any] | None
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    others: tuple[Generation, ...] = ()

    @classmethod
    def of_chunks(cls, chunks: Iterable[Chunk]) -> Generation:
        """Join the chunks of one request, in order."""
        by_choice: dict[int, list[Chunk]] = {}
        for chunk in chunks:
            by_choice.setdefault(chunk.choice, []).append(chunk)
        first, *others = (cls._of_choice(by_choice[choice]) for choice in sorted(by_choice))
        prompts = (chunk.prompt_logprobs for chunks in by_choice.values() for chunk in chunks)
        prompt_logprobs = next((each for each in prompts if each is not None), None)
        return replace(first, prompt_logprobs=prompt_logprobs, others=tuple(others))

    @classmethod
    def _of_choice(cls, chunks: list[Chunk]) -> Generation:
        last = chunks[-1]
        scored = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
        return cls(
            text="".join(chunk.text for chunk in chunks),
            finish_reason=last.finish_reason,
            num_input_tokens=last.num_input_tokens,
            num_output_tokens=sum(chunk.num_tokens for chunk in chunks),
            output_ids=last.stats.get("output_ids") if last.stats else None,
            stats=last.stats,
            logprobs=list(chain.from_iterable(scored)) if scored else None,
        )


@dataclass(frozen=True)
class ModelContract:
    """What a model's configuration says about how to talk to it."""

    name: str
    inputs: frozenset[str]
    decoupled: bool  # streams: several responses a request
    max_batch_size: int  # 0: tensors have no batch dimension
    server_batches: bool  # Triton has a batcher of its own in front of the model
    parameters: Mapping[str, str] = field(default_factory=dict)  # of the model's engine

    @classmethod
    def of_config(cls, config: Any) -> ModelContract:
        """Read a `ModelConfig` protobuf message."""
        return cls(
            name=config.name,
            inputs=frozenset(tensor.name for tensor in config.input),
            decoupled=config.model_transaction_policy.decoupled,
            max_batch_size=config.max_batch_size,
            server_batches=config.WhichOneof("scheduling_choice") is not None,
            parameters={key: value.string_value for key, value in config.parameters.items()},
        )

    @classmethod
    def of_json(cls, config: Mapping[str, Any]) -> ModelContract:
        """Read the JSON form of a model's configuration, as Triton's HTTP endpoint gives it."""
        return cls(
            name=config["name"],
            inputs=frozenset(tensor["name"] for tensor in config["input"]),
            decoupled=config.get("model_transaction_policy", {}).get("decoupled", False),
            max_batch_size=config["max_batch_size"],
            server_batches="dynamic_batching" in config or "sequence_batching" in config,
            parameters={key: value["string_value"] for key, value in config.get("parameters", {}).items()},
        )

    @property
    def engine(self) -> str:
        """Name of the engine behind the model, which its metrics bear; two models may share one."""
        return self.parameters.get("name") or self.name

    @property
    def client_batches(self) -> bool:
        """The model runs exactly the batch that one request brings."""
        return self.max_batch_size > 0 and not self.decoupled and not self.server_batches

    @property
    def takes_cancel(self) -> bool:
        """A running request can be cancelled by a second request with its id."""
        return "cancel" in self.inputs

    def request(
        self,
        request_id: str,
        prompt: str | None,
        input_ids: Sequence[int] | None,
        sampling: Mapping[str, Any],
        *,
        stream: bool,
    ) -> service_pb2.ModelInferRequest:
        """Build the request for one answer, whose prompt is given once: here, or in `sampling`.

        Raises:
            RequestFailed: there is no prompt or more than one, or the model takes text alone.
        """
        self._check_prompt(prompt, input_ids, sampling)
        if self.max_batch_size > 0:
            assert prompt is not None
            return self.batch_request(request_id, [prompt], [sampling])
        request = service_pb2.ModelInferRequest(model_name=self.name, id=request_id)
        if prompt is not None:
            _add_bytes(request, "text_input", [_encode(prompt)])
        if input_ids is not None:
            ids = _int32(input_ids)
            _add(request, "input_ids", "INT32", [len(ids)], ids.tobytes())
        _add_bytes(request, "sampling_parameters", [json.dumps(dict(sampling)).encode()])
        for flag in self._flags(sampling, stream):
            _add(request, flag, "BOOL", [1], b"\x01")
        return request

    def batch_request(
        self, request_id: str, prompts: Sequence[str], samplings: Sequence[Mapping[str, Any]]
    ) -> service_pb2.ModelInferRequest:
        """Build one request of n rows for a model with a batch dimension."""
        request = service_pb2.ModelInferRequest(model_name=self.name, id=request_id)
        texts = [json.dumps(dict(sampling)).encode() for sampling in samplings]
        _add_bytes(request, "text_input", [_encode(prompt) for prompt in prompts], in_rows=True)
        _add_bytes(request, "sampling_parameters", texts, in_rows=True)
        return request

    def cancel_request(self, request_id: str) -> service_pb2.ModelInferRequest:
        """Build the request that cancels the running request with this id."""
        request = service_pb2.ModelInferRequest(model_name=self.name, id=request_id)
        _add(request, "cancel", "BOOL", [1], b"\x01")
        return request

    def json_body(
        self, prompt: str | None, input_ids: Sequence[int] | None, sampling: Mapping[str, Any], *, stream: bool
    ) -> dict[str, Any]:
        """Build the body for Triton's HTTP generate endpoints."""
        self._check_prompt(prompt, input_ids, sampling)
        body: dict[str, Any] = {"sampling_parameters": json.dumps(dict(sampling))}
        if prompt is not None:
            body["text_input"] = prompt
        if input_ids is not None:
            body["input_ids"] = list(input_ids)
        return body | dict.fromkeys(self._flags(sampling, stream), True)

    def _flags(self, sampling: Mapping[str, Any], stream: bool) -> list[str]:
        scored = [f"return_{name}" for name in ("logprobs", "prompt_logprobs") if sampling.get(name) is not None]
        wanted = (*(["stream"] if stream else []), *_RETURN_FLAGS, *scored)
        return [flag for flag in wanted if flag in self.inputs]

    def _check_prompt(self, prompt: str | None, input_ids: Sequence[int] | None, sampling: Mapping[str, Any]) -> None:
        given = [prompt, input_ids, sampling.get("messages"), sampling.get("prompt_token_ids")]
        if sum(value is not None for value in given) != 1:
            wanted = "give exactly one of prompt, input_ids, messages and prompt_token_ids"
            raise RequestFailed(wanted, "INVALID_ARGUMENT")
        if prompt is None and "input_ids" not in self.inputs:
            raise RequestFailed(f"model {self.name} takes text alone, not input_ids or messages", "INVALID_ARGUMENT")


def is_final(response: service_pb2.ModelInferResponse) -> bool:
    """Whether this is the last response of its request; the answer of plain inference always is.

    Whoever has it reads on to the end of the stream before leaving. Triton (seen in 24.10) waits for ever for a request
    whose stream is cancelled right behind its last response, and its model can then not be unloaded any more.
    """
    if "triton_final_response" not in response.parameters:
        return True
    return response.parameters["triton_final_response"].bool_param


def parse_rows(response: service_pb2.ModelInferResponse) -> list[Chunk]:
    """Read a response: one chunk for each row of the batch, or each choice; one where the model has neither."""
    columns: dict[str, Sequence[Any]] = {}
    for output, content in zip(response.outputs, response.raw_output_contents, strict=True):
        name = output.name
        if name in _TEXTS:
            columns[name] = read_strings(content)
        elif name in _NUMBERS:
            columns[name] = struct.unpack(f"<{len(content) // 4}i", content)
    return _chunks(columns, final=is_final(response))


def parse_json_rows(answer: Mapping[str, Any], *, final: bool) -> list[Chunk]:
    """Read one JSON object of Triton's HTTP generate endpoints, which writes a list of one as its element.

    Raises:
        RequestFailed: the object carries an error.
    """
    if "error" in answer:
        raise RequestFailed(str(answer["error"]))
    columns = {name: answer[name] for name in (*_TEXTS, *_NUMBERS) if name in answer}
    columns = {name: values if isinstance(values, list) else [values] for name, values in columns.items()}
    return _chunks(columns, final=final)


_TEXTS = ("text_output", "finish_reason", "stats", "logprobs", "prompt_logprobs")
_NUMBERS = ("num_input_tokens", "num_output_tokens", "choice_index")  # 32 bits each


def _chunks(columns: Mapping[str, Sequence[Any]], *, final: bool) -> list[Chunk]:
    """One chunk for each row; what concerns the prompt stands once for all of them."""
    rows = len(columns.get("text_output", ("",)))
    chunks = []
    for row in range(rows):
        value = {name: column[row if len(column) == rows else 0] for name, column in columns.items() if column}.get
        stats, logprobs, prompt_logprobs = value("stats"), value("logprobs"), value("prompt_logprobs")
        chunks.append(
            Chunk(
                text=value("text_output", ""),
                num_tokens=value("num_output_tokens", 0),
                finish_reason=value("finish_reason") or None,
                stats=json.loads(stats) if stats else None,
                num_input_tokens=value("num_input_tokens"),
                final=final,
                choice=value("choice_index", 0),
                logprobs=json.loads(logprobs) if logprobs else None,
                prompt_logprobs=json.loads(prompt_logprobs) if prompt_logprobs else None,
            )
        )
    return chunks


def failure_of(error: grpc.RpcError, url: str) -> RequestFailed:
    """Turn a gRPC error into the client's own; a server that cannot be reached is named by its `url`."""
    code, details = error.code().name, error.details() or ""
    if code == "UNAVAILABLE" and "connect" in details.lower():
        return ServerUnreachable(f"no server answers at {url}", code)
    if code == "INTERNAL" and details == _LOST_CONNECTION:
        return RequestFailed(f"the connection to {url} broke", "UNAVAILABLE")
    return RequestFailed(details or "the server gave no reason", code)


def _add(
    request: service_pb2.ModelInferRequest, name: str, datatype: str, shape: Sequence[int], content: bytes
) -> None:
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    request.raw_input_contents.append(content)


def _add_bytes(
    request: service_pb2.ModelInferRequest, name: str, elements: Sequence[bytes], *, in_rows: bool = False
) -> None:
    """A tensor [n], or [n, 1] of rows: its shape is never another than what it holds."""
    shape = [len(elements), 1] if in_rows else [len(elements)]
    _add(request, name, "BYTES", shape, write_strings(elements))


def write_strings(elements: Sequence[bytes]) -> bytes:
    """The content of a BYTES tensor."""
    return b"".join(_BYTES_LENGTH.pack(len(element)) + element for element in elements)


def _encode(prompt: str) -> bytes:
    # Bytes of the command line that are no UTF-8 arrive as escapes; they travel as they were, for the server to refuse.
    try:
        return prompt.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise RequestFailed("the prompt holds half of a surrogate pair", "INVALID_ARGUMENT") from error


def _int32(input_ids: Sequence[int]) -> np.ndarray:
    wide = np.asarray(input_ids)
    bounds = np.iinfo(np.int32)
    if (
        wide.ndim != 1
        or (wide.size and wide.dtype.kind not in "iu")
        or np.any((wide < bounds.min) | (wide > bounds.max))
    ):
        raise RequestFailed("input_ids must be a flat list of 32-bit integers", "INVALID_ARGUMENT")
    return wide.astype(np.int32)


def read_strings(content: bytes) -> list[str]:
    """The elements of a BYTES tensor, as text."""
    strings, position = [], 0
    while position < len(content):
        (length,) = _BYTES_LENGTH.unpack_from(content, position)
        position += _BYTES_LENGTH.size
        strings.append(content[position : position + length].decode("utf-8", "replace"))
        position += length
    return strings
