"""Plain clients of a real server, and what tests ask of its metrics and its processes.

Requests go through tritonclient or raw HTTP, so that what is tested is the server and not our own client.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from slipstream_client.server.tritonserver import TritonServer

MODELS = ("continuous", "continuous_unary", "static", "dynamic", "iterative")
STREAMING = ("continuous", "iterative")
# The engine behind each model.
ENGINES = {"continuous": "continuous", "continuous_unary": "continuous"} | {
    name: name for name in ("static", "dynamic", "iterative")
}
# Of different lengths, so that a lock-step batch of them is really padded.
PROMPTS = (
    "The sky is",
    "Once upon a time there was a little",
    "def add(a, b):\n    return",
    "Water boils at",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
    "1, 2, 3, 4,",
    "My favourite colour is blue, because",
    "import os\nimport sys\n",
)
# Its greedy answer is the end-of-sequence token alone.
ENDED_PROMPT = "Question: what is the opposite of hot?\nAnswer:"
# Output tokens of the reference answers; every shorter greedy answer is a prefix of them.
NUM_GOLDEN = 16
# Long enough to be caught running, and then to be cancelled or killed.
LONG = {"max_tokens": 400, "ignore_eos": True}
# Long enough to be caught running, short enough to be waited for.
CAUGHT = {"max_tokens": 100, "ignore_eos": True}
# Several engines share few cores here, and a second thread only waits for cores that another engine has.
_ENVIRONMENT = {"SLIPSTREAM_THREADS": "1"}


def make_server(*models: str, **environment: str) -> TritonServer:
    """A server on free ports that was not started; with all models, `admin` among them, where none is named."""
    return TritonServer(
        models or None,
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        environment={**_ENVIRONMENT, **environment},
        admin=not models,
    )


class Refused(Exception):
    """An error that the server answered with; without a code where Triton itself refused a streamed request."""

    def __init__(self, text: str, code: str | None = None) -> None:
        super().__init__(f"{text} ({code})")
        self.text = text
        self.code = code


@dataclass(frozen=True)
class Response:
    """One response over gRPC: every output as a flat list of Python values."""

    request_id: str
    final: bool
    outputs: Mapping[str, list[Any]]

    @property
    def text(self) -> str:
        return self.outputs["text_output"][0]

    @property
    def finish_reason(self) -> str:
        return self.outputs["finish_reason"][0]

    @classmethod
    def of(cls, result: triton_grpc.InferResult) -> Response:
        message = result.get_response()
        outputs = {}
        for output in message.outputs:
            values = result.as_numpy(output.name).ravel().tolist()
            # Strict, so that half a character anywhere fails the test.
            outputs[output.name] = [v.decode("utf-8") if isinstance(v, bytes) else v for v in values]
        final = message.parameters["triton_final_response"].bool_param if message.parameters else True
        return cls(message.id, final, outputs)


@dataclass
class Answer:
    """A whole answer, joined from the responses of one request (or one row of a batch)."""

    text: str
    deltas: list[str]
    finish_reason: str
    num_input_tokens: int
    num_output_tokens: int
    stats: dict[str, Any] = field(repr=False)

    @property
    def ids(self) -> list[int]:
        return self.stats["output_ids"]

    @classmethod
    def of(cls, responses: Sequence[Mapping[str, list[Any]]], row: int = 0) -> Answer:
        last = responses[-1]
        deltas = [outputs["text_output"][row] for outputs in responses]
        return cls(
            text="".join(deltas),
            deltas=deltas,
            finish_reason=last["finish_reason"][row],
            num_input_tokens=last["num_input_tokens"][row],
            num_output_tokens=sum(outputs["num_output_tokens"][row] for outputs in responses),
            stats=json.loads(last["stats"][row]),
        )


def sampling_json(**sampling: Any) -> bytes:
    """Greedy unless told otherwise, and with the ids of the answer."""
    return json.dumps({"temperature": 0, "return_token_ids": True, **sampling}).encode()


def text_tensor(name: str, values: Sequence[str | bytes], shape: Sequence[int]) -> triton_grpc.InferInput:
    """A BYTES input; bytes travel as they are, UTF-8 or not."""
    elements = [value.encode() if isinstance(value, str) else value for value in values]
    tensor = triton_grpc.InferInput(name, list(shape), "BYTES")
    tensor.set_data_from_numpy(np.array(elements, dtype=object).reshape(shape))
    return tensor


def numpy_tensor(name: str, values: np.ndarray, datatype: str) -> triton_grpc.InferInput:
    """An input of numbers."""
    tensor = triton_grpc.InferInput(name, list(values.shape), datatype)
    tensor.set_data_from_numpy(values)
    return tensor


def flag_tensor(name: str, value: bool = True) -> triton_grpc.InferInput:
    """A BOOL input of the continuous models."""
    return numpy_tensor(name, np.array([value]), "BOOL")


def inputs_for(
    model: str, prompt: str | bytes, sampling: bytes, *, stream: bool = True
) -> list[triton_grpc.InferInput]:
    """The inputs of one request that asks for every output."""
    if not model.startswith("continuous"):
        return batch_inputs([prompt], [sampling])
    flags = ["return_finish_reason", "return_num_input_tokens", "return_num_output_tokens", "return_stats"]
    if model == "continuous" and stream:
        flags.append("stream")
    return [
        text_tensor("text_input", [prompt], [1]),
        text_tensor("sampling_parameters", [sampling], [1]),
        *(flag_tensor(flag) for flag in flags),
    ]


def batch_inputs(prompts: Sequence[str | bytes], samplings: Sequence[bytes]) -> list[triton_grpc.InferInput]:
    """The inputs of one request of n rows."""
    return [
        text_tensor("text_input", prompts, [len(prompts), 1]),
        text_tensor("sampling_parameters", samplings, [len(samplings), 1]),
    ]


class GrpcStream:
    """A gRPC stream of a tritonclient of its own; `cancel` ends it with everything that runs on it.

    As a context manager it is cancelled only while something runs: Triton (24.10) waits for ever for a request whose
    stream is cancelled right behind its last response, and its model can then not be unloaded.
    """

    def __init__(self, server: TritonServer) -> None:
        self._num_sent = self._num_ended = 0
        self._received: queue.SimpleQueue[Response | Refused] = queue.SimpleQueue()
        self._client = triton_grpc.InferenceServerClient(server.grpc_url)
        self._client.start_stream(self._receive)

    def send(
        self,
        model: str,
        prompt: str | bytes = "",
        *,
        inputs: Sequence[triton_grpc.InferInput] | None = None,
        request_id: str = "",
        stream: bool = True,
        empty_final: bool = False,
        sequence: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> GrpcStream:
        """Send a request; `inputs` replaces the usual ones, `sequence` has Triton's `sequence_id` and its flags."""
        if inputs is None:
            inputs = inputs_for(model, prompt, sampling_json(**sampling), stream=stream)
        self._num_sent += 1
        self._client.async_stream_infer(
            model, list(inputs), request_id=request_id, enable_empty_final_response=empty_final, **(sequence or {})
        )
        return self

    def receive(self, timeout_s: float = 60.0) -> Response:
        """The next response.

        Raises:
            Refused: it is an error.
        """
        received = self._received.get(timeout=timeout_s)
        if isinstance(received, Refused):
            raise received
        return received

    def collect(self) -> list[Response]:
        """All responses of the one request that was sent, to the final one."""
        responses = [self.receive()]
        while not responses[-1].final:
            responses.append(self.receive())
        return responses

    def answer(self) -> Answer:
        """All responses of the one request that was sent, joined."""
        return Answer.of([response.outputs for response in self.collect()])

    @property
    def quiet(self) -> bool:
        """Nothing has come that was not received."""
        return self._received.empty()

    def cancel(self) -> None:
        """End the stream at once; the server is told to cancel its requests."""
        self._client.stop_stream(cancel_requests=True)

    def close(self) -> None:
        """End the stream when its requests have ended, as a client does that has all it wants."""
        self._client.stop_stream()
        self._client.close()

    def __enter__(self) -> GrpcStream:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and self._num_ended < self._num_sent:
            self.cancel()
        self.close()

    def _receive(self, result: triton_grpc.InferResult | None, error: InferenceServerException | None) -> None:
        received = _refused(error) if error is not None else Response.of(result)
        self._num_ended += isinstance(received, Refused) or received.final
        self._received.put(received)


def ask(server: TritonServer, model: str, prompt: str | bytes, **sampling: Any) -> Answer:
    """One answer of any model over gRPC, from a client of its own; any thread may call.

    Raises:
        Refused: the server answered with an error.
    """
    return ask_with(server, model, inputs_for(model, prompt, sampling_json(**sampling)))


def golden_answers(server: TritonServer) -> dict[str, list[int]]:
    """Greedy output ids of every prompt from the continuous engine."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = pool.map(lambda prompt: ask(server, "continuous", prompt, max_tokens=NUM_GOLDEN), PROMPTS)
        return {prompt: answer.ids for prompt, answer in zip(PROMPTS, answers, strict=True)}


def ask_with(server: TritonServer, model: str, inputs: Sequence[triton_grpc.InferInput]) -> Answer:
    """One answer to these inputs; see `ask`."""
    if model in STREAMING:
        with GrpcStream(server) as stream:
            return stream.send(model, inputs=inputs).answer()
    return infer(server, model, inputs)[0]


def infer(server: TritonServer, model: str, inputs: Sequence[triton_grpc.InferInput]) -> list[Answer]:
    """Plain inference over gRPC: one answer for each row.

    Raises:
        Refused: the server answered with an error.
    """
    with triton_grpc.InferenceServerClient(server.grpc_url) as client:
        try:
            response = Response.of(client.infer(model, list(inputs)))
        except InferenceServerException as error:
            raise _refused(error) from error
    return [Answer.of([response.outputs], row) for row in range(len(response.outputs["text_output"]))]


def ask_batch(server: TritonServer, prompts: Sequence[str], samplings: Sequence[bytes]) -> list[Answer]:
    """The answers of the model `static` to one client batch."""
    return infer(server, "static", batch_inputs(prompts, samplings))


def _refused(error: InferenceServerException) -> Refused:
    """The error with the code that its text begins with, which must be that of the call where that has one."""
    status, text = (error.status() or "").removeprefix("StatusCode."), error.message()
    code, separator, rest = text.partition(": ")
    if not separator or code not in grpc.StatusCode.__members__:
        return Refused(text, status or None)
    assert status in ("", code), f"{status} is not the code of {text!r}"
    return Refused(rest, code)


def generate_body(model: str, prompt: str, *, stream: bool = False, **sampling: Any) -> dict[str, Any]:
    """The body for HTTP generate and generate_stream that asks for every output."""
    body: dict[str, Any] = {"text_input": prompt, "sampling_parameters": sampling_json(**sampling).decode()}
    if model.startswith("continuous"):
        for name in ("finish_reason", "num_input_tokens", "num_output_tokens", "stats"):
            body[f"return_{name}"] = True
    if model == "continuous":
        body["stream"] = stream
    return body


def post(
    server: TritonServer, path: str, body: Mapping[str, Any] | bytes = b"", timeout_s: float = 60.0
) -> tuple[int, str]:
    """POST to the server: the status and the body of its answer."""
    connection = http.client.HTTPConnection(server.http_url, timeout=timeout_s)
    with contextlib.closing(connection):
        connection.request("POST", f"/v2/{path}", body if isinstance(body, bytes) else json.dumps(body).encode())
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8")


def generate(server: TritonServer, model: str, body: Mapping[str, Any] | bytes) -> tuple[int, dict[str, Any]]:
    """HTTP generate: the status and the object it answers with."""
    status, text = post(server, f"models/{model}/generate", body)
    return status, json.loads(text)


def generate_stream(server: TritonServer, model: str, body: Mapping[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    """HTTP generate_stream: the status and the objects of its server-sent events, or the one object of a refusal."""
    status, text = post(server, f"models/{model}/generate_stream", body)
    if not text.startswith("data: "):
        return status, [json.loads(text)]
    events = text.split("\n\n")
    assert events.pop() == "", "the last event is whole"
    assert all(event.startswith("data: ") for event in events)
    return status, [json.loads(event.removeprefix("data: ")) for event in events]


def events_of(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The objects of server-sent events as they come."""
    for line in answer:
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))
