"""Answers of the continuous doors where something on the way to the client fails or hangs, over a scripted Triton."""

from __future__ import annotations

import importlib
import queue
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slipstream.doors.fields import Limits, RequestFields, parse_fields
from slipstream.engine.messages import NewRequest, Output

FINAL = 1
BROKEN_TOKEN = 99


class ScriptedTriton:
    """What of `triton_python_backend_utils` an answer uses: responses are kept as they were sent."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    TritonError = type("TritonError", (Exception,), {"INTERNAL": 1, "INVALID_ARG": 2, "UNAVAILABLE": 3, "CANCELLED": 4})
    Logger = SimpleNamespace(log_error=lambda text: None, log_info=lambda text: None)

    @staticmethod
    def get_input_tensor_by_name(request: Any, name: str) -> Any:
        return None

    @staticmethod
    def Tensor(name: str, values: np.ndarray) -> tuple[str, list[Any]]:
        return name, values.ravel().tolist()

    @staticmethod
    def InferenceResponse(output_tensors: Any = (), error: Any = None) -> dict[str, Any]:
        return {"error": error.args[0] if error else None, **dict(output_tensors)}


class Sender:
    """A response sender; `gate` holds every send up where it is closed."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.finals = 0
        self.gate = threading.Event()
        self.gate.set()
        self.sending = threading.Event()

    def send(self, response: dict[str, Any], flags: int = 0) -> None:
        self.sending.set()
        assert self.gate.wait(30)
        assert not self.finals, "a response behind the final one"
        self.sent.append(response)
        self.finals += flags == FINAL

    def is_cancelled(self) -> bool:
        return False


class Codec:
    """Text of one letter a token; one token breaks it."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        if BROKEN_TOKEN in token_ids:
            raise RuntimeError("this tokenizer is broken")
        return "".join(chr(ord("a") + token_id) for token_id in token_ids)

    def ends_in_bytes(self, token_ids: list[int]) -> bool:
        return False


class Door:
    """A continuous door without a server or an engine, whose sender runs when it is told to."""

    def __init__(self) -> None:
        continuous = importlib.import_module("slipstream.doors.continuous")
        self._answer_kind = importlib.import_module("slipstream.doors.answer").Answer
        self._door = continuous.ContinuousDoor.__new__(continuous.ContinuousDoor)
        self.cancelled: list[int] = []
        self.finished: list[int] = []
        self._door._answers = {}
        self._door._to_send = [queue.SimpleQueue()] * 2
        self._door._link = SimpleNamespace(cancel=self.cancelled.extend, finish=self.finished.extend)
        self.senders: dict[int, Sender] = {}

    def start(self, id_: int, max_bytes: int = 1 << 20, **values: Any) -> Any:
        """A streamed request that the engine has taken in."""
        sender = self.senders[id_] = Sender()
        request = SimpleNamespace(request_id=lambda: str(id_), get_response_sender=lambda: sender)
        fields: RequestFields = parse_fields(values, 1, Limits(512, 1000))
        answer = self._answer_kind(
            request,
            Codec(),
            NewRequest(id_, [0], fields.sampling, 0.0, True),
            fields,
            stream=True,
            echo=False,
            wanted=frozenset(["finish_reason"]),
            max_bytes=max_bytes,
        )
        self._door._answers.update(dict.fromkeys(answer.ids, answer))
        return answer

    def hear(self, *outputs: Output) -> None:
        """The engine's news, and whatever is to be sent of them."""
        for output in outputs:
            self._door._on_output(output)
        self._door._to_send[0].put(None)
        self._door._send_loop(self._door._to_send[0])


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", ScriptedTriton)
    own = (
        "slipstream.doors.answer",
        "slipstream.doors.continuous",
        "slipstream.doors.door",
        "slipstream.doors.metrics",
    )
    for name in own:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield Door()
    for name in own:
        sys.modules.pop(name, None)


def texts(sender: Sender) -> str:
    return "".join(response["text_output"][0].decode() for response in sender.sent if not response["error"])


def test_a_tokenizer_that_breaks_on_one_answer_fails_that_one_alone(door: Door) -> None:
    door.start(1)
    door.start(2)
    door.hear(Output(1, [3]), Output(2, [BROKEN_TOKEN]))
    door.hear(Output(1, [4], finish_reason="length"), Output(2, [5], finish_reason="length"))
    assert (texts(door.senders[1]), door.senders[1].finals) == ("de", 1)
    assert [response["error"] for response in door.senders[2].sent] == ["INTERNAL: this tokenizer is broken"]
    assert (door.senders[2].finals, door.cancelled) == (1, [2])


def test_a_tokenizer_that_breaks_on_the_last_token_still_ends_the_answer(door: Door) -> None:
    """The engine has ended it already: no further news would come to answer with."""
    door.start(2)
    door.hear(Output(2, [3]), Output(2, [BROKEN_TOKEN], finish_reason="length"))
    assert door.senders[2].finals == 1
    assert door.senders[2].sent[-1]["error"] == "INTERNAL: this tokenizer is broken"


def test_one_choice_that_fails_ends_the_request_and_the_others_are_not_computed_on(door: Door) -> None:
    door.start(10, n=3)
    door.hear(Output(10, [1], finish_reason="length"), Output(11, [2]))
    door.hear(Output(12, finish_reason="error", error="its logits were not finite", error_kind="internal"))
    assert door.senders[10].sent[-1]["error"] == "INTERNAL: its logits were not finite"
    assert (door.senders[10].finals, door.cancelled) == (1, [11, 12])


def test_what_comes_for_a_request_after_its_end_is_dropped(door: Door) -> None:
    door.start(1, n=2)
    door.hear(Output(1, finish_reason="error", error="broken", error_kind="internal"))
    door.hear(Output(2, [4, 5], finish_reason="length"))
    assert (len(door.senders[1].sent), door.senders[1].finals) == (1, 1)


def test_an_answer_that_takes_more_than_its_bound_ends_with_an_error(door: Door) -> None:
    door.start(1, max_bytes=5000)
    for token_id in (1, 2, 3, 4):
        door.hear(Output(1, [token_id]))
    assert texts(door.senders[1]) == "bcd"
    assert "max_response_bytes allows 5000" in door.senders[1].sent[-1]["error"]
    assert (door.senders[1].finals, door.cancelled) == (1, [1])


def test_the_bound_of_an_answer_is_in_bytes_and_not_in_characters(door: Door) -> None:
    door.start(1, max_bytes=3500)
    two_bytes_each = [900] * 1000
    door.hear(Output(1, two_bytes_each))
    assert len(texts(door.senders[1]).encode()) == 2000
    assert "max_response_bytes allows 3500" in door.senders[1].sent[-1]["error"]


def test_whoever_asks_for_cancellations_does_not_wait_for_a_send_that_hangs(door: Door) -> None:
    """Some versions of Triton let a sender wait until the client reads."""
    answer = door.start(1)
    door.senders[1].gate.clear()
    hanging = threading.Thread(target=door.hear, args=(Output(1, [1]),), daemon=True)
    hanging.start()
    assert door.senders[1].sending.wait(30)
    assert answer.is_cancelled() is False
    door.senders[1].gate.set()
    hanging.join(30)
    assert texts(door.senders[1]) == "b"


def test_the_engines_news_do_not_wait_for_a_send_that_hangs(door: Door) -> None:
    """They come from one thread for all answers: what it waits for, all wait for."""
    answer = door.start(1)
    door.senders[1].gate.clear()
    hanging = threading.Thread(target=door.hear, args=(Output(1, [1]),), daemon=True)
    hanging.start()
    assert door.senders[1].sending.wait(30)
    news = threading.Thread(target=answer.push, args=(Output(1, [2], finish_reason="length"),), daemon=True)
    news.start()
    news.join(5)
    took_it = not news.is_alive()
    door.senders[1].gate.set()
    hanging.join(30)
    assert took_it
    answer.send()
    assert (texts(door.senders[1]), door.senders[1].finals) == ("bc", 1)


def test_a_stopped_choice_is_finished_in_the_engine_and_the_others_go_on(door: Door) -> None:
    door.start(1, n=2, stop="c")
    door.hear(Output(1, [1, 2, 3]), Output(2, [1]))
    assert door.finished == [1]
    door.hear(Output(1, [4], finish_reason="stop"), Output(2, [3], finish_reason="length"))
    by_choice = dict.fromkeys((0, 1), "")
    for response in door.senders[1].sent:
        by_choice[response["choice_index"][0]] += response["text_output"][0].decode()
    assert by_choice == {0: "b", 1: "bd"}
    assert door.senders[1].finals == 1
