"""One request of the continuous doors in flight: the engine's news in, Triton's responses out."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from slipstream.doors.door import count_tensor, error_response, output_error, read_scalar, stats_json, text_tensor
from slipstream.doors.fields import RequestFields
from slipstream.doors.logprobs import logprobs_json
from slipstream.doors.text import Detokenizer, StopStrings, TextCodec
from slipstream.engine.messages import NewRequest, Output
from slipstream.engine.request import FINISH_STOP, TokenLogprobs
from slipstream.errors import InvalidRequest

# What a response takes in the server beside its texts (measured on Triton 24.10, three outputs over gRPC).
_RESPONSE_BYTES = 2048
_OPTIONAL_OUTPUTS = (
    "finish_reason",
    "cumulative_logprob",
    "logprobs",
    "prompt_logprobs",
    "num_input_tokens",
    "num_output_tokens",
    "stats",
)


def wanted_outputs(request: Any) -> frozenset[str]:
    """Which of the outputs beside the text a request asks for."""
    return frozenset(name for name in _OPTIONAL_OUTPUTS if read_scalar(request, f"return_{name}", False))


class Choice:
    """One of the answers to a prompt: its text as far as it can be shown, and what has been shown of it.

    Attributes:
        id: the engine's.
        text, num_tokens, logprobs: what has come since the last response.
        output_ids: all its tokens, up to the one that has completed a stop string.
        finish_reason, stats: once it has ended.
    """

    def __init__(self, id_: int, codec: TextCodec, fields: RequestFields, echo: str) -> None:
        self.id = id_
        self.text = echo
        self.num_tokens = 0
        self.logprobs: list[TokenLogprobs] = []
        self.cumulative_logprob = 0.0
        self.output_ids: list[int] = []
        self.finish_reason = ""
        self.stats = ""
        self._fields = fields
        self._detokenizer = Detokenizer(codec, fields.skip_special_tokens)
        self._stops = StopStrings(fields.stop, fields.include_stop_str_in_output, fields.sampling.min_tokens)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come: what the engine still computes is not wanted."""
        return self._stops.found is not None

    @property
    def ended(self) -> bool:
        return bool(self.finish_reason)

    def take_in(self, output: Output, num_input_tokens: int) -> None:
        """Turn tokens into text; with stop strings one by one, so that their portions do not matter."""
        width = 1 if self._fields.stop else max(1, len(output.token_ids))
        for start in range(0, len(output.token_ids), width):
            portion, scores = output.token_ids[start : start + width], output.logprobs[start : start + width]
            if not self.stopped:
                self.output_ids += portion
                self.num_tokens += len(portion)
                self.logprobs += scores
                self.cumulative_logprob += sum(score.values[0] for score in scores)
                self._show(self._detokenizer.push(self._fields.shown(portion), last=False))
        if output.finish_reason is None:
            return
        if not self.stopped:
            self._show(self._detokenizer.push([], last=True))
            self.text += self._stops.rest()
        self.finish_reason = FINISH_STOP if self.stopped else output.finish_reason
        self.stats = stats_json(output.stats, self._fields, num_input_tokens, self.output_ids, self._stops.found)

    def shown(self) -> None:
        """What has come has gone out."""
        self.text, self.num_tokens, self.logprobs = "", 0, []

    def _show(self, text: str) -> None:
        self.text += self._stops.push(text, len(self.output_ids))


class Answer:
    """What to send back for one request, and the sender to send it with.

    A stream has a response for each choice that something new can be shown of; else there is one for all of them. Its
    lock orders sending the final response before or after asking whether the client has cancelled: a sender must not be
    asked afterwards.

    Nothing tells a door whether the client reads. Triton takes every response at once and keeps it, read or not, so
    `max_bytes` bounds what it keeps for one request.
    """

    def __init__(
        self,
        request: Any,
        codec: TextCodec,
        new: NewRequest,
        fields: RequestFields,
        *,
        stream: bool,
        echo: bool,
        wanted: frozenset[str],
        max_bytes: int,
    ) -> None:
        self.lock = threading.Lock()
        self.final = False
        self.request_id: str = request.request_id()
        self.id = new.id
        self._stream = stream
        self._sender = request.get_response_sender()
        self._wanted = wanted | {"stats"} if fields.return_token_ids else wanted
        self._fields = fields
        self._codec = codec
        self._prompt_ids = new.prompt_ids
        # To be sent with the first response; a prompt of one token has none, and that is known at once.
        wants_prompt = fields.sampling.prompt_logprobs is not None
        self._prompt_logprobs: list[TokenLogprobs] | None = [] if wants_prompt else None
        text = codec.decode(new.prompt_ids) if echo else ""
        self._choices = [Choice(new.id + index, codec, fields, text) for index in range(fields.sampling.n)]
        self._pending: list[Output] = []
        # Of its own: the engine's news, for all answers, come from one thread, which no single response may hold up.
        self._pending_lock = threading.Lock()
        self._max_bytes = max_bytes
        self._sent_bytes = 0

    @property
    def ids(self) -> list[int]:
        """The engine's ids of all choices."""
        return [choice.id for choice in self._choices]

    @property
    def stopped_ids(self) -> list[int]:
        """Of choices that have all they need and that the engine has not ended yet."""
        return [choice.id for choice in self._choices if choice.stopped and not choice.ended]

    @property
    def running_ids(self) -> list[int]:
        """Of choices that the engine has not ended yet."""
        return [choice.id for choice in self._choices if not choice.ended]

    def push(self, output: Output) -> bool:
        """Take in news of the engine; True if a sender has to be told, False if one is about to look anyway."""
        with self._pending_lock:
            self._pending.append(output)
            return len(self._pending) == 1

    def send(self) -> None:
        """Send all news so far; nothing where no whole character has come and the answer goes on."""
        with self.lock:
            with self._pending_lock:
                news, self._pending = self._pending, []
            if self.final or not news:
                return
            changed: dict[int, Choice] = {}
            for output in news:
                choice = self._choices[output.id - self.id]
                error = output_error(output)
                if error is not None and not choice.stopped:
                    self._send(error_response(error), final=True)
                    return
                if output.prompt_logprobs:
                    self._prompt_logprobs = output.prompt_logprobs
                choice.take_in(output, len(self._prompt_ids))
                changed[choice.id] = choice
            self._send_choices(list(changed.values()))
            if self._stream and not self.final and self._sent_bytes > self._max_bytes:
                self._send(error_response(self._too_long()), final=True)

    def fail(self, error: Exception) -> None:
        """End with an error, unless it has ended or has all that it needs."""
        with self.lock:
            if self.final:
                return
            rest = [choice for choice in self._choices if not choice.ended]
            if rest and all(choice.stopped for choice in rest):
                for choice in rest:
                    choice.take_in(Output(choice.id, finish_reason=FINISH_STOP), len(self._prompt_ids))
                self._send_choices(rest)
            else:
                self._send(error_response(error), final=True)

    def is_cancelled(self) -> bool:
        """Whether the client wants it no more, as far as the server knows."""
        if not self.lock.acquire(blocking=False):  # something is being sent to it; there is a next time
            return False
        try:
            return not self.final and self._sender.is_cancelled()
        finally:
            self.lock.release()

    def _too_long(self) -> InvalidRequest:
        return InvalidRequest(
            f"the answer takes {self._sent_bytes} bytes in the server so far; max_response_bytes allows "
            f"{self._max_bytes} (fewer tokens, choices or log-probabilities take less)"
        )

    def _send_choices(self, changed: list[Choice]) -> None:
        """Send what can be shown of the choices that have news; the last response once all have ended."""
        all_ended = all(choice.ended for choice in self._choices)
        if self._stream:
            shown = [choice for choice in changed if choice.text or choice.ended]
            for choice in shown:
                self._send(self._response([choice]), final=all_ended and choice is shown[-1])
        elif all_ended:
            self._send(self._response(self._choices), final=True)

    def _response(self, choices: list[Choice]) -> Any:
        """What is new of some choices, in arrays side by side."""
        texts = {"text_output": [choice.text for choice in choices]}
        if "finish_reason" in self._wanted:
            texts["finish_reason"] = [choice.finish_reason for choice in choices]
        if "logprobs" in self._wanted:
            texts["logprobs"] = [self._logprobs_json(choice) for choice in choices]
        if "prompt_logprobs" in self._wanted:
            texts["prompt_logprobs"] = [self._prompt_logprobs_json()]
        if "stats" in self._wanted:
            texts["stats"] = [choice.stats for choice in choices]
        self._sent_bytes += _RESPONSE_BYTES + sum(len(text.encode()) for column in texts.values() for text in column)
        tensors = [text_tensor(name, column, (len(column),)) for name, column in texts.items()]
        shape = (len(choices),)
        if len(self._choices) > 1:
            indices = np.array([choice.id - self.id for choice in choices], np.int32)
            tensors.append(pb_utils.Tensor("choice_index", indices))
        if "cumulative_logprob" in self._wanted:
            sums = np.array([choice.cumulative_logprob for choice in choices], np.float32)
            tensors.append(pb_utils.Tensor("cumulative_logprob", sums))
        if "num_input_tokens" in self._wanted:
            tensors.append(count_tensor("num_input_tokens", [len(self._prompt_ids)], (1,)))
        if "num_output_tokens" in self._wanted:
            tensors.append(count_tensor("num_output_tokens", [choice.num_tokens for choice in choices], shape))
        for choice in choices:
            choice.shown()
        return pb_utils.InferenceResponse(output_tensors=tensors)

    def _logprobs_json(self, choice: Choice) -> str:
        if self._fields.sampling.logprobs is None:
            return "null"
        return logprobs_json(choice.logprobs, self._codec)

    def _prompt_logprobs_json(self) -> str:
        """With the first response alone; the first token has nothing before it to follow from."""
        if self._prompt_logprobs is None:
            return "null"
        scores, self._prompt_logprobs = self._prompt_logprobs, None
        return logprobs_json([None, *scores], self._codec)

    def _send(self, response: Any, final: bool) -> None:
        self.final = final
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)
