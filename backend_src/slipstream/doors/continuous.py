"""The doors `continuous` (decoupled: streams) and `continuous_unary` (one response): one engine, one contract.

`execute` only validates, tokenizes and hands over; it returns at once. Answers are sent by threads of their own, so
that neither the engine nor Triton ever waits for a client.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import triton_python_backend_utils as pb_utils

from slipstream.doors.answer import Answer, wanted_outputs
from slipstream.doors.chat import ChatTemplate
from slipstream.doors.door import (
    Door,
    error_response,
    read_column,
    read_scalar,
    request_parameters,
    text_tensor,
)
from slipstream.doors.fields import check_token_ids, list_of_ids, read_values
from slipstream.engine.messages import NewRequest, Output
from slipstream.errors import InvalidRequest, Unavailable

# Each response is a round trip to the server; two threads overlap them, more gain nothing.
_NUM_SENDERS = 2
_CANCEL_POLL_S = 0.1


class ContinuousDoor(Door):
    """Token streams from the continuous engine; with a transaction policy that is not decoupled, whole answers."""

    def initialize(self, args: dict[str, str]) -> None:
        """See Door.initialize."""
        self._answers: dict[int, Answer] = {}  # by the engine's ids of what is still computed for them
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
            self._answers.update(dict.fromkeys(answer.ids, answer))
        try:
            if accepted:
                self._link.submit([new for _, new in accepted])
        except Exception as error:
            for answer, _ in accepted:
                self._forget(answer)
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
        wanted = wanted_outputs(request)
        if "cumulative_logprob" in wanted and fields.sampling.logprobs is None:
            new.sampling = msgspec.structs.replace(new.sampling, logprobs=0)
        echo = not read_scalar(request, "exclude_input_in_output", True)
        answer = Answer(
            request,
            self._codec,
            new,
            fields,
            stream=stream,
            echo=echo,
            wanted=wanted,
            max_bytes=self._config.max_response_bytes,
        )
        return answer, new

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
        ids = [id_ for id_, answer in list(self._answers.items()) if request_id and answer.request_id == request_id]
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
            self._to_send[answer.id % _NUM_SENDERS].put(answer)

    def _fail_all(self, reason: str) -> None:
        while self._answers:
            try:
                _, answer = self._answers.popitem()
            except KeyError:
                return
            answer.fail(Unavailable(reason))

    def _forget(self, answer: Answer) -> None:
        """Have nothing that still comes for it."""
        for id_ in answer.ids:
            self._answers.pop(id_, None)

    def _send_loop(self, answers: queue.SimpleQueue[Answer | None]) -> None:
        while (answer := answers.get()) is not None:
            try:
                answer.send()
                if answer.final and answer.running_ids:  # one of its choices has failed, or it is too long
                    self._forget(answer)
                    self._link.cancel(answer.running_ids)
                elif answer.stopped_ids:
                    self._link.finish(answer.stopped_ids)
            except Exception as error:
                pb_utils.Logger.log_error(f"request {answer.request_id!r} could not be answered: {error!r}")
                self._give_up(answer, error)

    def _give_up(self, answer: Answer, error: Exception) -> None:
        """End a request whose news could not be made into a response: it alone has failed."""
        try:
            self._forget(answer)
            self._link.cancel(answer.ids)
            answer.fail(error)
        except Exception as another:
            pb_utils.Logger.log_error(f"request {answer.request_id!r} could not even be refused: {another!r}")

    def _watch_cancellations(self) -> None:
        while not self._closing.wait(_CANCEL_POLL_S):
            cancelled = [answer for answer in set(self._answers.values()) if answer.is_cancelled()]
            if cancelled:
                self._link.cancel([id_ for answer in cancelled for id_ in answer.running_ids])


def _refuse(request: Any, error: Exception) -> None:
    request.get_response_sender().send(error_response(error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
