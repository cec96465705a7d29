"""The doors `continuous` (decoupled: streams) and `continuous_unary` (one response): one engine, one contract.

`execute` only validates, tokenizes and hands over; it returns at once. Answers are sent by threads of their own, so
that neither the engine nor Triton ever waits for a client.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

from slipstream.doors.chat import ChatTemplate
from slipstream.doors.door import (
    Door,
    count_tensor,
    error_response,
    output_error,
    read_column,
    read_scalar,
    request_parameters,
    stats_json,
    text_tensor,
)
from slipstream.doors.fields import RequestFields, check_token_ids, list_of_ids, read_values
from slipstream.doors.text import Detokenizer, StopStrings, TextCodec
from slipstream.engine.messages import NewRequest, Output
from slipstream.engine.request import FINISH_STOP
from slipstream.errors import InvalidRequest, Unavailable

# Each response is a round trip to the server; two threads overlap them, more gain nothing.
_NUM_SENDERS = 2
_CANCEL_POLL_S = 0.1


class Answer:
    """One request in flight: what to send back, and the sender to send it with.

    Its lock orders sending the final response before or after asking whether the client has cancelled: a sender must
    not be asked afterwards.
    """

    def __init__(
        self, request: Any, codec: TextCodec, new: NewRequest, fields: RequestFields, stream: bool, echo: bool
    ) -> None:
        self.lock = threading.Lock()
        self.final = False
        self.request_id: str = request.request_id()
        self.id = new.id
        self._stream = stream
        self._sender = request.get_response_sender()
        self._wanted = {name for name in _OPTIONAL_OUTPUTS if read_scalar(request, f"return_{name}", False)}
        if fields.return_token_ids:
            self._wanted.add("stats")
        self._fields = fields
        self._detokenizer = Detokenizer(codec, fields.skip_special_tokens)
        self._stops = StopStrings(fields.stop, fields.include_stop_str_in_output, fields.sampling.min_tokens)
        self._held_text = codec.decode(new.prompt_ids) if echo else ""
        self._held_tokens = 0
        self._num_input_tokens = len(new.prompt_ids)
        self._output_ids: list[int] = []
        self._pending: list[Output] = []

    def push(self, output: Output) -> bool:
        """Take in news of the engine; True if a sender has to be told, False if one is about to look anyway."""
        with self.lock:
            self._pending.append(output)
            return len(self._pending) == 1

    def send(self) -> None:
        """Send all news so far as one response; nothing where no whole character has come and the answer goes on."""
        with self.lock:
            news, self._pending = self._pending, []
            if self.final or not news:
                return
            error = output_error(news[-1])
            if error is not None and self._stops.found is None:
                self._send(error_response(error), final=True)
                return
            last = news[-1].finish_reason is not None
            for output in news:
                self._take_in(output.token_ids, last and output is news[-1])
            if last or (self._stream and self._held_text):
                self._send(self._response(news[-1]), final=last)

    @property
    def complete(self) -> bool:
        """Whether a stop string has come: what the engine still computes is not wanted."""
        return self._stops.found is not None

    def fail(self, error: Exception) -> None:
        """End with an error, unless it has ended or has all that it needs."""
        with self.lock:
            if self.final:
                return
            if self.complete:
                self._send(self._response(Output(self.id, finish_reason=FINISH_STOP)), final=True)
            else:
                self._send(error_response(error), final=True)

    def _take_in(self, token_ids: list[int], last: bool) -> None:
        """Turn tokens into text; with stop strings one by one, so that their portions do not matter."""
        for portion in [[token_id] for token_id in token_ids] if self._fields.stop else [token_ids]:
            if not self.complete:
                self._output_ids += portion
                self._held_tokens += len(portion)
                self._show(self._detokenizer.push(portion, last=False))
        if last and not self.complete:
            self._show(self._detokenizer.push([], last=True))
            self._held_text += self._stops.rest()

    def _show(self, text: str) -> None:
        self._held_text += self._stops.push(text, len(self._output_ids))

    def is_cancelled(self) -> bool:
        """Whether the client wants it no more, as far as the server knows."""
        with self.lock:
            return not self.final and self._sender.is_cancelled()

    def _response(self, output: Output) -> Any:
        tensors = [text_tensor("text_output", [self._held_text], (1,))]
        if "finish_reason" in self._wanted:
            reason = FINISH_STOP if output.finish_reason and self.complete else output.finish_reason
            tensors.append(text_tensor("finish_reason", [reason or ""], (1,)))
        if "num_input_tokens" in self._wanted:
            tensors.append(count_tensor("num_input_tokens", [self._num_input_tokens], (1,)))
        if "num_output_tokens" in self._wanted:
            tensors.append(count_tensor("num_output_tokens", [self._held_tokens], (1,)))
        if "stats" in self._wanted:
            final = output.finish_reason is not None
            stats = (
                stats_json(output.stats, self._fields, self._num_input_tokens, self._output_ids, self._stops.found)
                if final
                else ""
            )
            tensors.append(text_tensor("stats", [stats], (1,)))
        self._held_text, self._held_tokens = "", 0
        return pb_utils.InferenceResponse(output_tensors=tensors)

    def _send(self, response: Any, final: bool) -> None:
        self.final = final
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)


_OPTIONAL_OUTPUTS = ("finish_reason", "num_input_tokens", "num_output_tokens", "stats")


class ContinuousDoor(Door):
    """Token streams from the continuous engine; with a transaction policy that is not decoupled, whole answers."""

    def initialize(self, args: dict[str, str]) -> None:
        """See Door.initialize."""
        self._answers: dict[int, Answer] = {}
        self._closing = threading.Event()
        self._to_send: list[queue.SimpleQueue[Answer | None]] = [queue.SimpleQueue() for _ in range(_NUM_SENDERS)]
        self._threads = [
            *(threading.Thread(target=self._send_loop, args=(q,), name="sender", daemon=True) for q in self._to_send),
            threading.Thread(target=self._watch_cancellations, name="cancellations", daemon=True),
        ]
        super().initialize(args)
        self._chat = ChatTemplate(self._folder)
        for thread in self._threads:
            thread.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Take requests in; each is answered later, or at once where it is refused."""
        accepted: list[tuple[Answer, NewRequest]] = []
        for request in requests:
            try:
                if read_scalar(request, "cancel", False):
                    self._cancel(request)
                else:
                    accepted.append(self._accept(request))
            except Exception as error:
                _refuse(request, error)
        for answer, _ in accepted:
            self._answers[answer.id] = answer
        try:
            if accepted:
                self._link.submit([new for _, new in accepted])
        except Exception as error:
            for answer, _ in accepted:
                self._answers.pop(answer.id, None)
                answer.fail(error)

    def finalize(self) -> None:
        """See Door.finalize."""
        self._closing.set()
        for sends in self._to_send:
            sends.put(None)
        for thread in self._threads:
            thread.join(timeout=5)
        super().finalize()

    def _accept(self, request: Any) -> tuple[Answer, NewRequest]:
        values = read_values(read_scalar(request, "sampling_parameters"), request_parameters(request))
        prompt_ids = self._prompt_ids(request, values)
        stream = bool(read_scalar(request, "stream", False))
        new, fields = self._read(prompt_ids, values, stream=stream)
        new.stream |= bool(fields.stop)  # only the text tells when it is to stop
        echo = not read_scalar(request, "exclude_input_in_output", True)
        return Answer(request, self._codec, new, fields, stream, echo), new

    def _prompt_ids(self, request: Any, values: dict[str, Any]) -> list[int]:
        """The prompt, from the one of its four places that is used; taken out of `values` if it is there."""
        sources = {
            "text_input": read_scalar(request, "text_input"),
            "input_ids": read_column(request, "input_ids"),
            "prompt_token_ids": values.pop("prompt_token_ids", None),
            "messages": values.pop("messages", None),
        }
        given = {name: value for name, value in sources.items() if value is not None}
        if len(given) != 1:
            raise InvalidRequest(f"exactly one of {', '.join(sources)} is needed, not {' and '.join(given) or 'none'}")
        ((name, value),) = given.items()
        if name == "text_input":
            return self._codec.encode(value, name)
        if name == "messages":
            # The template writes the special tokens itself.
            return self._codec.encode(self._chat.render(value).encode(), name, add_special_tokens=False)
        ids = list_of_ids(name, value)
        check_token_ids(name, ids, self._limits.vocab_size)
        return ids

    def _cancel(self, request: Any) -> None:
        """Cancel the running requests that have this request's id, and answer with an empty text."""
        request_id = request.request_id()
        ids = [answer.id for answer in list(self._answers.values()) if request_id and answer.request_id == request_id]
        if not ids:
            raise InvalidRequest(f"cancel: no running request has the id {request_id!r}")
        self._link.cancel(ids)
        response = pb_utils.InferenceResponse(output_tensors=[text_tensor("text_output", [""], (1,))])
        request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _on_output(self, output: Output) -> None:
        answer = self._answers.get(output.id)
        if answer is None:
            return
        if output.finish_reason is not None:
            self._answers.pop(output.id, None)
        if answer.push(output):
            self._to_send[output.id % _NUM_SENDERS].put(answer)

    def _fail_all(self, reason: str) -> None:
        while self._answers:
            try:
                _, answer = self._answers.popitem()
            except KeyError:
                return
            answer.fail(Unavailable(reason))

    def _send_loop(self, answers: queue.SimpleQueue[Answer | None]) -> None:
        while (answer := answers.get()) is not None:
            try:
                answer.send()
                if answer.complete and not answer.final:
                    self._link.finish([answer.id])
            except Exception as error:
                pb_utils.Logger.log_error(f"request {answer.request_id!r} could not be answered: {error}")
                self._link.cancel([answer.id])

    def _watch_cancellations(self) -> None:
        while not self._closing.wait(_CANCEL_POLL_S):
            cancelled = [answer.id for answer in list(self._answers.values()) if answer.is_cancelled()]
            if cancelled:
                self._link.cancel(cancelled)


def _refuse(request: Any, error: Exception) -> None:
    request.get_response_sender().send(error_response(error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
