"""The door `iterative`: Triton's iterative sequences. Triton calls `execute` once a step with that step's sequences.

Each call answers every sequence with at most one token and asks Triton to call again, until the sequence has ended. Its
state lies here and in the engine, by the correlation id that Triton gave it.

Triton's core (24.10, and in 2026 still) keeps the slot of a sequence that counts as cancelled when it is released,
until it has been idle for `max_sequence_idle_microseconds`. So a cancelled one is rescheduled, for Triton to end it
itself, and a final response is sent only after the call that released its sequence: many a client cancels its stream
as soon as it has the answer.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import triton_python_backend_utils as pb_utils

from slipstream.doors.collector import Collector
from slipstream.doors.door import (
    Door,
    count_tensor,
    error_response,
    output_error,
    read_scalar,
    request_parameters,
    stats_json,
    text_tensor,
)
from slipstream.doors.fields import RequestFields, read_values
from slipstream.doors.lost_slots import LostSlots
from slipstream.doors.text import Detokenizer
from slipstream.engine.messages import NewRequest, Output
from slipstream.errors import Cancelled, InvalidRequest

# A sequence that Triton has not named for so many calls, or for so long without any call, will not come back: one that
# waits in Triton's queue is in the next call or the one after.
_CALLS_UNTIL_LOST = 4
_SECONDS_UNTIL_LOST = 3.0
_NO_SEQUENCE_FLAGS = (
    "the sequence_id belongs to another request or to none; leave sequence_id, sequence_start and sequence_end out"
)
# Triton has released the sequences of a call when it makes the next one; without a next one, within this time.
_RELEASE_S = 0.003


_Identity = int  # hash of request id, text_input and sampling_parameters


@dataclass(slots=True)
class IterativeSequence:
    """One sequence between two calls."""

    new: NewRequest
    fields: RequestFields
    detokenizer: Detokenizer
    identity: _Identity
    output_ids: list[int] = field(default_factory=list)
    held_text: str = ""
    held_tokens: int = 0
    last_call: int = 0  # number of the call that named it last
    sender: Any = None  # of that call
    intruders: set[_Identity] = field(default_factory=set)  # who wait for its end to be refused


class IterativeDoor(Door):
    """One token a call, from an engine that computes what each call names.

    Triton does not tell a model when it drops a sequence that was cancelled between two calls; the door notices that
    such a sequence is named no more, and ends it in the engine.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """See Door.initialize."""
        self._sequences: dict[int, IterativeSequence] = {}  # by correlation id
        # Sequences that were given up and answered; should one be named again, it must not be answered twice.
        self._given_up: dict[int, _Identity] = {}
        self._collector = Collector()
        self._call = threading.Lock()  # held by a call, and while sequences are given up
        self._num_calls = 0
        self._last_call_s = time.monotonic()
        self._closing = threading.Event()
        inputs = [text_tensor("text_input", [""], (1, 1)), text_tensor("sampling_parameters", ["{}"], (1, 1))]
        self._lost_slots = LostSlots(args["model_name"], inputs)
        self._endings: list[tuple[Any, Any]] = []  # of this call: response senders and their final responses
        self._to_send: queue.SimpleQueue[list[tuple[Any, Any]] | None] = queue.SimpleQueue()
        self._next_call = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch_for_silence, name="lost-sequences", daemon=True),
            threading.Thread(target=self._send_endings, name="sender", daemon=True),
        ]
        super().initialize(args)
        for thread in self._threads:
            thread.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Compute one step for the sequences that Triton names."""
        self._next_call.set()
        with self._call:
            self._num_calls += 1
            self._step(requests)
            self._give_up(lambda sequence: self._num_calls - sequence.last_call >= _CALLS_UNTIL_LOST)
            self._last_call_s = time.monotonic()
            endings, self._endings = self._endings, []
        if endings:
            self._next_call.clear()
            self._to_send.put(endings)

    def finalize(self) -> None:
        """See Door.finalize."""
        self._closing.set()
        self._to_send.put(None)
        for thread in self._threads:
            thread.join(timeout=5)
        super().finalize()

    def _step(self, requests: Sequence[Any]) -> None:
        named: list[tuple[Any, int, IterativeSequence]] = []
        new: list[NewRequest] = []
        for request in requests:
            try:
                correlation_id = int(read_scalar(request, "CORRID"))
                starts, identity = bool(read_scalar(request, "START")), _identity(request)
                if not starts and self._given_up.get(correlation_id) == identity:
                    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL)
                    continue
                if starts:
                    self._given_up.pop(correlation_id, None)
                if correlation_id in self._lost_slots and not read_scalar(request, "text_input"):
                    raise Cancelled("the slot has been given back")
                if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END:
                    raise InvalidRequest(_NO_SEQUENCE_FLAGS)
                if correlation_id in self._sequences and not self._is_named_by(identity, correlation_id, starts):
                    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                    continue
                if starts:
                    self._sequences[correlation_id] = self._start(request, identity)
                    new.append(self._sequences[correlation_id].new)
                elif correlation_id not in self._sequences:
                    raise InvalidRequest(_NO_SEQUENCE_FLAGS)
                sequence = self._sequences[correlation_id]
                sequence.last_call, sequence.sender = self._num_calls, request.get_response_sender()
                named.append((request, correlation_id, sequence))
            except Exception as error:
                self._end_with_error(request, error)
        started = {request.id for request in new}
        try:
            outputs = self._compute(new, [s.new.id for _, _, s in named if s.new.id not in started])
        except Exception as error:
            for request, correlation_id, _ in named:
                self._sequences.pop(correlation_id, None)
                self._end_with_error(request, error)
            return
        for request, correlation_id, sequence in named:
            output = outputs[sequence.new.id]
            # None of these is raised: by its traceback an error would hold the request, and Triton unloads a model only
            # when nobody holds a rescheduled request any more.
            ending = output_error(output) or (Cancelled("Request was cancelled") if request.is_cancelled() else None)
            if ending is not None:
                self._drop(request, correlation_id, sequence, ending)
                continue
            try:
                self._answer(request, correlation_id, sequence, output)
            except Exception as error:
                self._drop(request, correlation_id, sequence, error)

    def _start(self, request: Any, identity: _Identity) -> IterativeSequence:
        text, sampling = read_scalar(request, "text_input"), read_scalar(request, "sampling_parameters")
        values = read_values(sampling, request_parameters(request))
        new, fields = self._read(self._codec.encode(text, "text_input"), values, stream=True)
        return IterativeSequence(new, fields, Detokenizer(self._codec, fields.skip_special_tokens), identity)

    def _is_named_by(self, identity: _Identity, correlation_id: int, starts: bool) -> bool:
        """Whether a call with the id of a sequence that runs is that sequence's next call.

        Triton numbers requests 1, 2, 3, … and takes the ids of clients as they come. One that names a sequence of
        somebody else must get none of its tokens: it waits until that one has ended, and is refused then. Of two that
        cannot be told apart neither can be answered.
        """
        sequence = self._sequences[correlation_id]
        sequence.last_call = self._num_calls  # its slot lives, and its turn comes
        if not starts and identity == sequence.identity:
            return True
        if identity == sequence.identity:
            self._link.cancel([self._sequences.pop(correlation_id).new.id])
        elif starts:
            sequence.intruders.add(identity)
        elif identity not in sequence.intruders:
            raise InvalidRequest(_NO_SEQUENCE_FLAGS)  # Triton reschedules only what has begun with a START
        return False

    def _compute(self, new: list[NewRequest], advance: list[int]) -> dict[int, Output]:
        """One step of the engine; an output for every id, empty where a sequence found no room yet."""
        if not new and not advance:
            return {}
        self._collector.expect([*(request.id for request in new), *advance])
        self._link.submit(new, advance)
        return self._collector.wait(lambda _: None, interval_s=60.0)

    def _answer(self, request: Any, correlation_id: int, sequence: IterativeSequence, output: Output) -> None:
        last = output.finish_reason is not None
        sequence.output_ids += output.token_ids
        sequence.held_tokens += len(output.token_ids)
        sequence.held_text += sequence.detokenizer.push(sequence.fields.shown(output.token_ids), last)
        if last:
            del self._sequences[correlation_id]
            self._end(request, _response(sequence, output))
            return
        if sequence.held_text:
            request.get_response_sender().send(_response(sequence, output))
        request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)

    def _drop(self, request: Any, correlation_id: int, sequence: IterativeSequence, error: Exception) -> None:
        """End a sequence that has not come to its end, here and in the engine."""
        self._sequences.pop(correlation_id, None)
        self._link.cancel([sequence.new.id])
        self._end_with_error(request, error)

    def _end_with_error(self, request: Any, error: Exception) -> None:
        """End a sequence with an error; a cancelled one unanswered, by rescheduling it."""
        if request.is_cancelled():
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        else:
            self._end(request, error_response(error))

    def _end(self, request: Any, response: Any) -> None:
        """Release a sequence with this call; its final response follows."""
        self._endings.append((request.get_response_sender(), response))
        request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL)

    def _send_endings(self) -> None:
        while (endings := self._to_send.get()) is not None:
            self._next_call.wait(_RELEASE_S)
            for sender, response in endings:
                try:
                    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                except Exception as error:
                    pb_utils.Logger.log_error(f"a sequence's final response could not be sent: {error}")

    def _watch_for_silence(self) -> None:
        while not self._closing.wait(_SECONDS_UNTIL_LOST / 4):
            with self._call:
                if time.monotonic() - self._last_call_s >= _SECONDS_UNTIL_LOST:
                    self._give_up(lambda _: True)

    def _give_up(self, is_lost: Callable[[IterativeSequence], bool]) -> None:
        """Forget sequences that Triton has dropped, end them in the engine, and give back their slots."""
        lost = [correlation_id for correlation_id, sequence in self._sequences.items() if is_lost(sequence)]
        for correlation_id in lost:
            sequence = self._sequences.pop(correlation_id)
            self._link.cancel([sequence.new.id])
            if not sequence.sender.is_cancelled():
                # Its client waits: another request has ended the sequence in Triton.
                self._given_up[correlation_id] = sequence.identity
                self._to_send.put([(sequence.sender, error_response(InvalidRequest(_NO_SEQUENCE_FLAGS)))])
            self._lost_slots.recover(correlation_id)

    def _on_output(self, output: Output) -> None:
        self._collector.deliver(output)

    def _fail_all(self, reason: str) -> None:
        self._collector.fail(reason)


def _identity(request: Any) -> _Identity:
    tensors = (read_scalar(request, name) for name in ("text_input", "sampling_parameters"))
    return hash((request.request_id(), *tensors))


def _response(sequence: IterativeSequence, output: Output) -> Any:
    """What has come since the last response, [1, 1] each."""
    shape = (1, 1)
    num_input, stats = len(sequence.new.prompt_ids), ""
    if output.finish_reason is not None:
        stats = stats_json(output.stats, sequence.fields, num_input, sequence.output_ids)
    response = pb_utils.InferenceResponse(
        output_tensors=[
            text_tensor("text_output", [sequence.held_text], shape),
            text_tensor("finish_reason", [output.finish_reason or ""], shape),
            count_tensor("num_input_tokens", [num_input], shape),
            count_tensor("num_output_tokens", [sequence.held_tokens], shape),
            text_tensor("stats", [stats], shape),
        ]
    )
    sequence.held_text, sequence.held_tokens = "", 0
    return response
