"""The requests of a soak run: each kind asks in one way and asserts the only right answer.

A kind returns how its request, or each of its choices, ended for the engine, or `REFUSED` where it never came to it; so
what the engine has counted at the end must be what the clients saw.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from helpers import (
    LONG,
    PROMPTS,
    Answer,
    GrpcStream,
    Refused,
    Response,
    ask,
    events_of,
    generate,
    generate_body,
    generate_stream,
)
from observing import wait_until
from slipstream_client.server.tritonserver import TritonServer

REFUSED = "refused"
NUM_CHOICES = 3
SEED = 7
# Output tokens: few or many, since a forecast from the lengths so far is most often wrong where there is no middle.
FEW, MANY, LONGEST = 10, 30, 40
# How often each kind comes among one round of requests.
SHARES = {
    "finish": 6,
    "length": 6,
    "stop": 3,
    "cancel": 2,
    "disconnect": 2,
    "deadline": 2,
    "bad_input": 2,
    "slow_reader": 1,
    "several_choices": 2,
}
_PRIORITIES = (0, 1)
TENANTS = ("red", "green", "blue", "grey")
# The longest queue or preemption that a client sits through.
_PATIENCE_S = 60.0
_BAD: Sequence[tuple[Mapping[str, Any], str]] = (
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"max_tokens": 100_000}, "max_tokens is 100000"),
    ({"temperature": -1.0}, "temperature is -1.0"),
    ({"top_p": 2}, "top_p is 2"),
    ({"stop": [""]}, "stop has ''"),
    ({"priority": 5000}, "priority is 5000"),
    ({"max_token": 4}, "unknown field 'max_token'"),
    ({"prompt_token_ids": [1]}, "exactly one of text_input"),
)


@dataclass(frozen=True)
class SoakRequest:
    """One request; `variant` chooses among the ways to ask that its kind has."""

    number: int
    kind: str
    prompt: str
    seeded: bool  # sampled with a seed, else greedy
    length: int
    variant: int
    of_the_queue: Mapping[str, Any]  # priority, tenant and the like

    @property
    def id(self) -> str:
        return f"soak-{self.number}"

    @property
    def num_choices(self) -> int:
        """Answers to it, each of which the engine counts."""
        return NUM_CHOICES if self.kind == "several_choices" else 1

    def sampling(self, **sampling: Any) -> dict[str, Any]:
        """Its parameters; the answer does not end before it is told to."""
        chance = how_to_sample(self.seeded)
        return {"ignore_eos": True, **chance, **self.of_the_queue, **sampling}


@dataclass(frozen=True)
class Site:
    """A server, and what it answers to each prompt when that is asked alone: ids by (prompt, seeded)."""

    server: TritonServer
    alone: Mapping[tuple[str, bool], list[int]]
    text_of: Callable[[Sequence[int]], str]


def how_to_sample(seeded: bool) -> dict[str, Any]:
    """Either way the same tokens every time."""
    return {"temperature": 1.0, "seed": SEED} if seeded else {"temperature": 0}


def make_requests(count: int, seed: int, prompts: Sequence[str] = PROMPTS) -> list[SoakRequest]:
    """Requests of all kinds in a random order that the seed alone determines."""
    chance = random.Random(seed)
    one_round = [kind for kind, share in SHARES.items() for _ in range(share)]
    kinds = [one_round[number % len(one_round)] for number in range(count)]
    chance.shuffle(kinds)
    return [
        SoakRequest(
            number=number,
            kind=kind,
            prompt=chance.choice(prompts),
            seeded=chance.random() < 0.5,
            length=chance.choice((chance.randint(4, FEW), chance.randint(MANY, LONGEST))),
            variant=chance.randrange(1 << 16),
            of_the_queue={
                "priority": chance.choice(_PRIORITIES),
                "tenant": chance.choice(TENANTS),
                # Every other one shares no beginning with any other.
                **({"cache_salt": f"{number}"} if number % 2 else {}),
            },
        )
        for number, kind in enumerate(kinds)
    ]


def ask_alone(server: TritonServer, prompts: Iterable[str]) -> dict[tuple[str, bool], list[int]]:
    """The ids of the answers to each prompt, with nothing beside it in the engine."""
    return {
        (prompt, seeded): ask(
            server, "continuous", prompt, max_tokens=LONGEST, ignore_eos=True, **how_to_sample(seeded)
        ).ids
        for prompt in prompts
        for seeded in (False, True)
    }


def finish(site: Site, request: SoakRequest) -> str:
    """Ends by itself, as by an end-of-sequence token."""
    sampling = request.sampling(max_tokens=LONGEST + 1, stop_length=request.length)
    return _assert_whole(site, request, _ask(site, request, sampling), request.length, "stop")


def length(site: Site, request: SoakRequest) -> str:
    """Ends at its max_tokens."""
    answer = _ask(site, request, request.sampling(max_tokens=request.length))
    return _assert_whole(site, request, answer, request.length, "length")


def stop(site: Site, request: SoakRequest) -> str:
    """Ends before a stop string, with the token that completes it."""
    ids = site.alone[request.prompt, False]
    text = site.text_of(ids)
    start = 1 + request.variant % (len(text) // 2)
    string = text[start : start + 6]
    num_tokens = next(count for count in range(1, len(ids) + 1) if string in site.text_of(ids[:count]))
    answer = _ask(site, request, request.sampling(**how_to_sample(False), max_tokens=LONGEST, stop=[string]))
    expected = (ids[:num_tokens], text[: text.find(string)])
    assert (answer.ids, answer.text) == expected, f"{answer} instead of {expected}, which {string!r} ends"
    assert (answer.finish_reason, answer.stats["stop_reason"]) == ("stop", string)
    return "stop"


def cancel(site: Site, request: SoakRequest) -> str:
    """Is withdrawn by another request that names it, wherever it is then, and ends with that error."""
    if request.variant % 2:
        with GrpcStream(site.server) as stream:
            stream.send("continuous", request.prompt, request_id=request.id, **request.sampling(**LONG))
            _withdraw(site, "continuous", request)
            assert _refusal(stream.collect).text == "Request was cancelled"
        assert stream.quiet
        return "cancelled"
    body = {**generate_body("continuous_unary", request.prompt, **request.sampling(**LONG)), "id": request.id}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(generate, site.server, "continuous_unary", body)
        _withdraw(site, "continuous_unary", request)
        assert answer.result() == (400, {"error": "CANCELLED: Request was cancelled"})
    return "cancelled"


def disconnect(site: Site, request: SoakRequest) -> str:
    """Its client goes away while it is being answered."""
    if request.variant % 2:
        stream = GrpcStream(site.server).send("continuous", request.prompt, **request.sampling(**LONG))
        stream.receive(_PATIENCE_S)
        stream.cancel()
        stream.close()
        return "cancelled"
    with contextlib.closing(_open_event_stream(site, request, request.sampling(**LONG))) as answer:
        assert next(events_of(answer))["finish_reason"] == ""
    return "cancelled"


def deadline(site: Site, request: SoakRequest) -> str:
    """Ends at its time limit: with the tokens so far, or in the queue with an error."""
    sampling = request.sampling(max_tokens=LONG["max_tokens"], timeout_ms=50 + request.variant % 750)
    try:
        return _assert_timed_out(site, request, _ask_by_stream(site, request, sampling))
    except Refused as error:
        refused = error
    assert refused.text.startswith("deadline: still in the queue after"), refused.text
    assert refused.code == "UNAVAILABLE"
    return "error"


def bad_input(site: Site, request: SoakRequest) -> str:
    """Is refused with the field's name."""
    sampling, says = _BAD[request.variant % len(_BAD)]
    if request.number % 2:
        status, answer = generate(
            site.server, "continuous_unary", generate_body("continuous_unary", request.prompt, **sampling)
        )
        assert status == 400
        text = answer["error"]
        assert text.startswith("INVALID_ARGUMENT: ")
    else:
        refused = _refusal(lambda: ask(site.server, "continuous", request.prompt, **sampling))
        assert refused.code == "INVALID_ARGUMENT"
        text = refused.text
    assert says in text, text
    return REFUSED


class SlowStream(GrpcStream):
    """A client that takes a while over every response, and reads no other meanwhile."""

    PAUSE_S = 0.1

    def _receive(self, result: Any, error: Any) -> None:
        time.sleep(self.PAUSE_S)
        super()._receive(result, error)


def slow_reader(site: Site, request: SoakRequest) -> str:
    """Gets its whole answer, however long it leaves that lying."""
    sampling = request.sampling(max_tokens=request.length)
    if request.variant % 2:
        answer = _ask_by_stream(site, request, sampling, SlowStream)
    else:
        with contextlib.closing(_open_event_stream(site, request, sampling)) as response:
            events = events_of(response)
            received = [next(events)]
            time.sleep(2.0)
            received += events
        answer = _joined(received)
    return _assert_whole(site, request, answer, request.length, "length")


def several_choices(site: Site, request: SoakRequest) -> str:
    """Several answers to one prompt; the first is the one that it would get alone."""
    sampling = request.sampling(**how_to_sample(True), n=NUM_CHOICES, max_tokens=request.length)
    with GrpcStream(site.server) as stream:
        response = _one_response(stream, request, sampling)
    assert response.outputs["choice_index"] == list(range(NUM_CHOICES))
    assert response.outputs["finish_reason"] == ["length"] * NUM_CHOICES
    assert response.outputs["text_output"][0] == site.text_of(site.alone[request.prompt, True][: request.length])
    return "length"


KINDS: Mapping[str, Callable[[Site, SoakRequest], str]] = {
    kind.__name__: kind
    for kind in (finish, length, stop, cancel, disconnect, deadline, bad_input, slow_reader, several_choices)
}


def _assert_whole(site: Site, request: SoakRequest, answer: Answer, num_tokens: int, reason: str) -> str:
    ids = site.alone[request.prompt, request.seeded][:num_tokens]
    assert answer.ids == ids, f"{answer.ids} instead of {ids}, after {answer.stats['preemptions']} preemptions"
    assert answer.text == site.text_of(ids)
    assert answer.num_output_tokens == num_tokens
    assert answer.finish_reason == reason
    return reason


def _assert_timed_out(site: Site, request: SoakRequest, answer: Answer) -> str:
    alone = site.alone[request.prompt, request.seeded]
    assert answer.ids[: len(alone)] == alone[: len(answer.ids)]
    assert answer.finish_reason == "timeout"
    return "timeout"


def _refusal(action: Callable[[], object]) -> Refused:
    """The error that an action ends with."""
    try:
        answer = action()
    except Refused as refused:
        return refused
    raise AssertionError(f"not refused but answered: {answer}")


def _ask(site: Site, request: SoakRequest, sampling: Mapping[str, Any]) -> Answer:
    """The whole answer, through one of the ways to get it."""
    ways = (_ask_by_stream, _ask_for_one_response, _ask_unary, _ask_over_http, _ask_for_events)
    return ways[request.variant % len(ways)](site, request, sampling)


def _ask_by_stream(
    site: Site, request: SoakRequest, sampling: Mapping[str, Any], kind_of_stream: type[GrpcStream] = GrpcStream
) -> Answer:
    with kind_of_stream(site.server) as stream:
        stream.send("continuous", request.prompt, request_id=request.id, **sampling)
        answer = stream.answer()
    assert stream.quiet, "something came behind the final response"
    return answer


def _ask_for_one_response(site: Site, request: SoakRequest, sampling: Mapping[str, Any]) -> Answer:
    with GrpcStream(site.server) as stream:
        response = _one_response(stream, request, sampling)
    assert stream.quiet, "something came behind the only response"
    return Answer.of([response.outputs])


def _one_response(stream: GrpcStream, request: SoakRequest, sampling: Mapping[str, Any]) -> Response:
    stream.send("continuous", request.prompt, request_id=request.id, stream=False, **sampling)
    response = stream.receive(_PATIENCE_S)
    assert (response.final, response.request_id) == (True, request.id)
    return response


def _ask_unary(site: Site, request: SoakRequest, sampling: Mapping[str, Any]) -> Answer:
    return ask(site.server, "continuous_unary", request.prompt, **sampling)


def _ask_over_http(site: Site, request: SoakRequest, sampling: Mapping[str, Any]) -> Answer:
    status, answer = generate(site.server, "continuous", generate_body("continuous", request.prompt, **sampling))
    assert status == 200, answer
    return _joined([answer])


def _ask_for_events(site: Site, request: SoakRequest, sampling: Mapping[str, Any]) -> Answer:
    body = generate_body("continuous", request.prompt, stream=True, **sampling)
    status, events = generate_stream(site.server, "continuous", body)
    assert status == 200, events
    return _joined(events)


def _joined(events: Sequence[Mapping[str, Any]]) -> Answer:
    """What came over HTTP as an answer; no event but the last may say that it is that."""
    assert [event["finish_reason"] != "" for event in events] == [False] * (len(events) - 1) + [True]
    return Answer.of([{name: [value] for name, value in event.items()} for event in events])


def _open_event_stream(site: Site, request: SoakRequest, sampling: Mapping[str, Any]) -> http.client.HTTPResponse:
    """A stream of events whose client has little room for what it does not read; it owns its connection."""
    connection = http.client.HTTPConnection(site.server.http_url, timeout=_PATIENCE_S)
    connection.connect()
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    body = generate_body("continuous", request.prompt, stream=True, **sampling)
    connection.request("POST", "/v2/models/continuous/generate_stream", json.dumps(body), {"Connection": "close"})
    return connection.getresponse()


def _withdraw(site: Site, model: str, request: SoakRequest) -> None:
    """Cancel the request as soon as the model knows it."""
    cancelled = {"id": request.id, "cancel": True}
    wait_until(lambda: generate(site.server, model, cancelled)[0] == 200, f"{request.id} can be cancelled")
