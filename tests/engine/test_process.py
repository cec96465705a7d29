"""What an engine's process promises its doors and tools, over its real sockets, with a runner that the tests script.

The process's loop runs in a thread here, and a step is computed when the test lets it: so cancels, drains and doors
that leave meet the engine at an exact moment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deadline import PATIENCE_S, wait_until
from door import Door, new_request
from scripted import ScriptedRunner, expected_output, make_config, make_prompt
from scripted_process import GatedRunner, Server
from slipstream.engine.link import EngineFailed
from slipstream.engine.messages import Update
from slipstream.engine.request import CANCELLED, INTERNAL, INVALID, UNAVAILABLE, SamplingParams
from slipstream_client import control

PROMPTS = [make_prompt(5 + number, number) for number in range(6)]


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Starts servers on a given runner; closes them after the test."""
    servers: list[Server] = []

    def start(runner: ScriptedRunner | Callable[[], ScriptedRunner], **config: Any) -> Server:
        load = runner if callable(runner) else lambda: runner
        servers.append(Server(load, make_config(**{"grace_seconds": 0, **config})))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def runner() -> GatedRunner:
    return GatedRunner()


def expected(prompt_ids: list[int], max_tokens: int = 8) -> list[int]:
    return expected_output(prompt_ids, SamplingParams(max_tokens, temperature=0.0, ignore_eos=True))[0]


# --- loading


def test_a_door_waits_while_the_engine_loads_and_a_tool_is_told_so(serve: Any) -> None:
    loaded = threading.Event()

    def load() -> ScriptedRunner:
        assert loaded.wait(PATIENCE_S)
        return ScriptedRunner(64)

    server = serve(load)
    path = server.directory / "scripted.sock"
    opening = threading.Thread(target=server.open)
    opening.start()
    status = control.request(path, {"type": "status"})
    assert (status["state"], status["doors"]) == ("loading", 0)
    loaded.set()
    opening.join(PATIENCE_S)
    assert not opening.is_alive()
    status = control.request(path, {"type": "status"})
    assert (status["state"], status["doors"]) == ("ready", 1)


def test_a_failure_to_load_is_told_to_the_door_and_ends_the_engine(serve: Any) -> None:
    greeted = threading.Event()

    def load() -> ScriptedRunner:
        assert greeted.wait(PATIENCE_S)
        raise RuntimeError("the weights are missing")

    server = serve(load)
    waiting = server.process._greetings
    threading.Thread(target=lambda: (wait_until(lambda: waiting, "the door has greeted"), greeted.set())).start()
    with pytest.raises(EngineFailed, match="the weights are missing"):
        server.open()
    server.thread.join(PATIENCE_S)
    assert not server.thread.is_alive()


# --- doors


def test_two_doors_may_use_the_same_ids(serve: Any, runner: GatedRunner) -> None:
    server = serve(runner)
    first, second = server.open(), server.open()
    assert first.status()["doors"] == 2
    first.ask(0, PROMPTS[0])
    second.ask(0, PROMPTS[1], max_tokens=12, stream=False)
    runner.let()
    assert first.answer(0) == expected(PROMPTS[0])
    assert second.answer(0) == expected(PROMPTS[1], 12)
    assert (len(first.outputs[0]), len(second.outputs[0])) == (8, 1)


def test_a_door_that_fails_over_its_news_gets_the_next_and_disturbs_nobody(
    serve: Any, runner: GatedRunner, caplog: pytest.LogCaptureFixture
) -> None:
    """ENG-06: metrics are the doors' business, so what goes wrong there never reaches the engine."""
    server = serve(runner)
    broken, sound = server.open(), server.open()
    failures = iter(range(3))
    take = broken.link._on_update

    def fail_over_the_first(update: Update) -> None:
        if update.outputs and next(failures, None) is not None:
            raise RuntimeError("a counter can only be incremented by non-negative values")
        take(update)

    broken.link._on_update = fail_over_the_first
    broken.ask(0, PROMPTS[0])
    sound.ask(0, PROMPTS[1])
    runner.let()
    assert sound.answer(0) == expected(PROMPTS[1])
    assert broken.answer(0) == expected(PROMPTS[0])[3:]
    assert caplog.text.count("the door of engine scripted failed over its news") == 3
    assert broken.downs == sound.downs == []


def test_a_door_with_another_configuration_is_refused_with_both_fingerprints(serve: Any) -> None:
    server = serve(ScriptedRunner(64))
    door = server.open()
    other = make_config(grace_seconds=0, max_num_seqs=3)
    with pytest.raises(EngineFailed) as refusal:
        Door(other, server.directory)
    assert server.config.fingerprint in str(refusal.value)
    assert other.fingerprint in str(refusal.value)
    assert "max_num_seqs is 3 here and 16 there" in str(refusal.value)
    door.ask(0, PROMPTS[0])
    assert door.answer(0) == expected(PROMPTS[0])


def test_a_door_that_leaves_takes_its_requests_with_it(serve: Any, runner: GatedRunner) -> None:
    server = serve(runner)
    door, leaving = server.open(), server.open()
    leaving.link.submit([new_request(number, PROMPTS[1], max_tokens=100) for number in range(4)])
    runner.wait_until_a_step_has_begun()
    closing = threading.Thread(target=leaving.link.close)  # which returns when the engine has said its last
    closing.start()
    runner.let()
    closing.join(PATIENCE_S)
    wait_until(lambda: door.status()["doors"] == 1, "the engine notices that a door has left")
    status = door.status()
    assert (status["running"], status["waiting"], status["kv_blocks_used"]) == (0, 0, 0)
    assert status["finished"] == {"cancelled": 4}
    door.ask(0, PROMPTS[0])
    assert door.answer(0) == expected(PROMPTS[0])
    door.wait_for(lambda: door.stats and door.stats[-1].finished == {"cancelled": 4, "length": 1})


def test_the_leading_door_learns_how_the_engine_fares(serve: Any, runner: GatedRunner) -> None:
    """Gauges are zero again as soon as the engine is idle; when the leader leaves, the next door leads."""
    server = serve(runner)
    leader, next_door = server.open(), server.open()
    for number, prompt in enumerate(PROMPTS):
        next_door.ask(number, prompt)
    runner.let()
    leader.wait_for(lambda: leader.stats and leader.stats[-1].generation_tokens == 8 * len(PROMPTS))
    last = leader.stats[-1]
    assert (last.running, last.waiting, last.kv_blocks_used, last.kv_blocks_total) == (0, 0, 0, 64)
    assert last.finished == {"length": 6}
    assert max(stats.kv_blocks_peak for stats in leader.stats) >= 6
    assert next_door.stats == []
    leader.link.close()
    next_door.wait_for(lambda: next_door.stats and next_door.stats[-1].generation_tokens == 8 * len(PROMPTS))


def test_a_leader_that_leaves_has_seen_all_that_the_next_door_takes_as_published(
    serve: Any, runner: GatedRunner
) -> None:
    server = serve(runner)
    leader, next_door = server.open(), server.open()
    next_door.ask(0, PROMPTS[0], max_tokens=200)
    runner.let()
    next_door.wait_for(lambda: len(next_door.tokens(0)) > 50)
    leader.link.close()
    assert len(next_door.answer(0)) == 200
    next_door.wait_for(lambda: next_door.stats[-1].generation_tokens == 200)
    assert next_door.published == [leader.stats[-1]]
    assert 50 < leader.stats[-1].generation_tokens <= 200


def test_a_door_that_fails_over_some_news_still_gets_the_next(
    serve: Any, runner: GatedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = serve(runner).open()
    failures: list[Update] = []

    def fail_once(update: Update) -> None:
        if update.outputs and not failures:
            failures.append(update)
            raise RuntimeError("a door's bug")
        door.take(update)

    monkeypatch.setattr(door.link, "_on_update", fail_once)
    door.ask(0, PROMPTS[0])
    runner.let()
    assert door.answer(0) == expected(PROMPTS[0])[1:]


def test_an_engine_outlives_its_last_door_by_the_grace_and_leaves_nothing(serve: Any) -> None:
    server = serve(ScriptedRunner(64), grace_seconds=1)
    server.open().link.close()
    door = server.open()
    assert server.thread.is_alive(), "a door that came within the grace did not find the engine"
    door.ask(0, PROMPTS[0])
    assert door.answer(0) == expected(PROMPTS[0])
    door.link.close()
    server.thread.join(PATIENCE_S)
    assert [path.name for path in server.directory.iterdir()] == ["scripted.lock"]


# --- requests


def test_a_cancel_during_the_step_that_ends_the_prefill(serve: Any, runner: GatedRunner) -> None:
    """CAN-05: the step's own token still comes, then the end, and nothing after it; cancelled once."""
    server = serve(runner)
    door = server.open()
    runner.during[0] = lambda: (door.link.cancel([0]), door.link.cancel([0]), server.wait_for_command())
    runner.let()
    door.ask(0, PROMPTS[0], max_tokens=200)
    last = door.end_of(0)
    assert (last.finish_reason, last.error_kind) == ("cancelled", CANCELLED)
    assert last.error == "Request was cancelled"
    assert [output.token_ids for output in door.outputs[0]] == [expected(PROMPTS[0], 1), []]
    door.ask(1, PROMPTS[1])
    assert door.answer(1) == expected(PROMPTS[1])
    assert len(door.outputs[0]) == 2
    door.wait_for(lambda: door.stats and door.stats[-1].finished == {"cancelled": 1, "length": 1})


def test_a_cancel_during_the_last_step_comes_too_late(serve: Any, runner: GatedRunner) -> None:
    """CAN-06: one terminal state, that of the step; the engine's blocks are free and it serves on."""
    server = serve(runner)
    door = server.open()
    runner.during[1] = lambda: (door.link.cancel([0]), server.wait_for_command())
    runner.let()
    door.ask(0, PROMPTS[0], max_tokens=2)
    assert door.answer(0) == expected(PROMPTS[0], 2)
    door.ask(1, PROMPTS[1], max_tokens=1)
    assert door.answer(1) == expected(PROMPTS[1], 1)
    assert [output.finish_reason for output in door.outputs[0]] == [None, "length"]
    assert door.status()["kv_blocks_used"] == 0


def test_refused_requests_leave_those_beside_them_their_answer(serve: Any, runner: GatedRunner) -> None:
    """SAM-13: one good request among twenty bad ones in a single message, and one that takes an id in use."""
    door = serve(runner).open()
    prompts = {**{number: [5] * 2000 if number % 2 else [] for number in range(20)}, 20: PROMPTS[2]}
    door.link.submit([*(new_request(id_, prompt) for id_, prompt in prompts.items()), new_request(20, PROMPTS[3])])
    runner.let()
    door.wait_for(lambda: len(door.tokens(20)) == 8)
    assert door.tokens(20) == expected(PROMPTS[2])
    assert {door.end_of(number).error_kind for number in range(20)} == {INVALID}
    assert door.end_of(0).error == "the prompt has no tokens"
    assert "at most 1024 are allowed" in str(door.end_of(1).error)
    refusals = [(output.error, output.error_kind) for output in door.outputs[20] if output.error is not None]
    assert refusals == [("request 20 is still running", INVALID)]


def test_a_deadline_counts_from_the_arrival_and_the_engine_has_one_for_all(serve: Any, runner: GatedRunner) -> None:
    door = serve(runner, max_num_seqs=2, max_request_seconds=1).open()
    runner.during[0] = lambda: time.sleep(0.3)  # meanwhile the times of 1 and 2 run out
    runner.during[1] = lambda: time.sleep(1.0)  # and here that of everyone
    timeouts = [None, 0.2, 0.2, 500.0]
    door.link.submit(
        [new_request(n, PROMPTS[n], max_tokens=100, timeout_s=timeout) for n, timeout in enumerate(timeouts)]
    )
    runner.let()
    assert [door.end_of(number).finish_reason for number in range(4)] == ["timeout", "timeout", "error", "timeout"]
    assert door.end_of(2).error_kind == UNAVAILABLE
    assert "deadline: still in the queue" in str(door.end_of(2).error)
    assert door.tokens(0) == expected(PROMPTS[0], 2)
    assert door.tokens(1) == expected(PROMPTS[1], 1)


def test_a_full_queue_is_told_as_unavailable(serve: Any, runner: GatedRunner) -> None:
    door = serve(runner, max_num_seqs=1, max_queued_requests=2).open()
    door.link.submit([new_request(number, PROMPTS[number]) for number in range(4)])
    assert door.end_of(3).error_kind == UNAVAILABLE
    assert "the queue is full: 2 requests wait" in str(door.end_of(3).error)
    runner.let()
    door.wait_for(lambda: door.stats and door.stats[-1].refused == {"unavailable": 1})
    assert [door.answer(number) for number in range(3)] == [expected(prompt) for prompt in PROMPTS[:3]]


def test_a_failed_step_is_told_with_its_reason(serve: Any) -> None:
    """ENG-15: and the engine goes on with golden answers."""
    door = serve(ScriptedRunner(64, failing_steps={0})).open()
    door.ask(0, PROMPTS[0])
    last = door.end_of(0)
    assert (last.finish_reason, last.error_kind) == ("error", INTERNAL)
    assert last.error == "the step that computed it failed: StepFailed: scripted failure of step 0"
    door.ask(1, PROMPTS[0])
    assert door.answer(1) == expected(PROMPTS[0])


def test_an_iterative_engine_advances_what_each_call_names(serve: Any) -> None:
    door = serve(ScriptedRunner(64), policy="iterative").open()
    door.ask(0, PROMPTS[0], max_tokens=3)
    door.wait_for(lambda: len(door.tokens(0)) == 1)
    door.link.submit([new_request(1, PROMPTS[1], max_tokens=3)], advance=[0])
    door.wait_for(lambda: len(door.tokens(0)) == 2 and len(door.tokens(1)) == 1)
    for count in (2, 3):
        door.link.submit([], advance=[1])
        door.wait_for(lambda count=count: len(door.tokens(1)) == count)
    assert len(door.tokens(0)) == 2, "a sequence that was not named was computed"
    door.link.submit([], advance=[0, 1])
    assert door.answer(0) == expected(PROMPTS[0], 3)
    assert door.tokens(1) == expected(PROMPTS[1], 3)
    door.wait_for(lambda: door.outputs[1][-1].error == "the sequence has ended")


# --- the control socket


def test_step_records_can_be_fetched(serve: Any) -> None:
    door = serve(ScriptedRunner(64)).open()
    door.ask(0, PROMPTS[0], max_tokens=5)
    door.answer(0)
    records = door.tell({"type": "records", "last": 9})["records"]
    assert [record["sampled_rows"] for record in records] == [1] * 5
    assert [record["prefill_rows"] for record in records] == [len(PROMPTS[0]), 0, 0, 0, 0]
    assert len(door.tell({"type": "records", "last": 2})["records"]) == 2


@pytest.mark.parametrize(
    "message",
    [
        {"type": "nonsense"},
        {},
        {"type": "records", "last": "many"},
        {"type": "records", "last": float("inf")},
        {"type": "drain", "timeout_s": "soon"},
        {"type": "door"},
        {"type": "door", "identity": "no hex", "fingerprint": "", "config": {}},
        {"type": "door", "identity": "00", "fingerprint": "", "config": []},
    ],
    ids=str,
)
def test_a_message_that_is_none_is_answered_with_an_error(serve: Any, message: dict[str, Any]) -> None:
    """And the engine goes on."""
    door = serve(ScriptedRunner(64)).open()
    answer = door.tell(message)
    assert answer["type"] == "error"
    assert answer["reason"]
    assert door.status()["state"] == "ready"
    door.ask(0, PROMPTS[0])
    assert door.answer(0) == expected(PROMPTS[0])


def drain(door: Door, timeout_s: float) -> tuple[threading.Thread, list[dict[str, Any]]]:
    """Ask for a drain from another thread; its answer comes into the list."""
    answers: list[dict[str, Any]] = []
    message = {"type": "drain", "timeout_s": timeout_s}
    thread = threading.Thread(target=lambda: answers.append(door.tell(message)))
    thread.start()
    return thread, answers


def test_a_drained_engine_finishes_what_runs_and_refuses_the_rest(serve: Any, runner: GatedRunner) -> None:
    door = serve(runner, max_num_seqs=1).open()
    door.link.submit([new_request(0, PROMPTS[0], max_tokens=400), new_request(1, PROMPTS[1])])
    runner.let(1)
    door.wait_for(lambda: door.tokens(0))
    thread, answers = drain(door, timeout_s=PATIENCE_S)
    wait_until(lambda: (runner.let(1), door.outputs.get(1))[1], "the engine takes in the drain between two steps")
    last = door.end_of(1)
    assert (last.error_kind, last.error) == (UNAVAILABLE, "the server is shutting down")
    door.ask(2, PROMPTS[1])
    runner.let()
    assert door.end_of(2).error_kind == UNAVAILABLE
    assert door.answer(0) == expected(PROMPTS[0], 400)
    thread.join(PATIENCE_S)
    assert answers == [{"type": "drained", "finished": 1, "aborted": 1}]
    assert door.status()["state"] == "draining"
    assert door.tell({"type": "drain"}) == answers[0]


def test_a_drain_lets_choices_finish_that_wait_for_a_seat(serve: Any, runner: GatedRunner) -> None:
    """Their request runs: it is not ended for those of its answers that have not begun."""
    door = serve(runner, max_num_seqs=1).open()
    door.link.submit([new_request(0, PROMPTS[0], max_tokens=20, n=3), new_request(10, PROMPTS[1])])
    runner.let(1)
    door.wait_for(lambda: door.tokens(0))
    thread, answers = drain(door, timeout_s=PATIENCE_S)
    wait_until(lambda: (runner.let(1), door.outputs.get(10))[1], "the engine takes in the drain between two steps")
    runner.let()
    assert [door.end_of(number).error for number in (0, 1, 2)] == [None] * 3
    thread.join(PATIENCE_S)
    assert answers == [{"type": "drained", "finished": 3, "aborted": 1}]


def test_a_drain_ends_what_takes_too_long(serve: Any, runner: GatedRunner) -> None:
    door = serve(runner).open()
    door.ask(0, PROMPTS[0], max_tokens=400)
    runner.let(3)
    door.wait_for(lambda: len(door.tokens(0)) == 3)
    thread, answers = drain(door, timeout_s=0)
    wait_until(lambda: (runner.let(1), door.outputs[0][-1].error)[1], "the engine takes in the drain between two steps")
    last = door.end_of(0)
    assert last.error == "the server is shutting down and the request did not end in time"
    assert last.error_kind == UNAVAILABLE
    thread.join(PATIENCE_S)
    assert answers == [{"type": "drained", "finished": 0, "aborted": 1}]
