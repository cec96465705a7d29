"""Doors and an engine in a process of its own: the same answers as in-process, and clear words when it dies."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from deadline import PATIENCE_S, wait_until
from slipstream.config import EngineConfig
from slipstream.engine import messages
from slipstream.engine.link import EngineFailed, EngineLink
from slipstream.engine.messages import EngineStats, NewRequest, Output, Update
from slipstream.engine.request import SamplingParams
from slipstream.errors import Unavailable
from slipstream_client import control
from tiny_model import TinyEngine, make_config, make_prompts

PROMPTS = make_prompts(6)


class Door:
    """What a Triton model does with its link, without Triton."""

    def __init__(self, config: EngineConfig, directory: Path) -> None:
        self.outputs: dict[int, list[Output]] = {}
        self.stats: list[EngineStats] = []
        self.downs: list[str] = []
        self.directory = directory
        self._news = threading.Condition()
        self.link = EngineLink(config, directory, self.take, self._take_down)
        self.info = self.link.start()

    def take(self, update: Update) -> None:
        with self._news:
            for output in update.outputs:
                self.outputs.setdefault(output.id, []).append(output)
            if update.stats is not None:
                self.stats.append(update.stats)
            self._news.notify_all()

    def _take_down(self, reason: str) -> None:
        with self._news:
            self.downs.append(reason)
            self._news.notify_all()

    def ask(self, id_: int, prompt_ids: list[int], *, stream: bool = True, **sampling: Any) -> None:
        parameters = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling})
        self.link.submit([NewRequest(id_, prompt_ids, parameters, time.monotonic(), stream)])

    def wait_for(self, condition: Callable[[], object]) -> None:
        with self._news:
            assert self._news.wait_for(condition, PATIENCE_S), "no such news from the engine"

    def end_of(self, id_: int) -> Output:
        """The last output of a request, once it has come."""
        self.wait_for(lambda: self.outputs.get(id_) and self.outputs[id_][-1].finish_reason is not None)
        return self.outputs[id_][-1]

    def answer(self, id_: int) -> list[int]:
        """All tokens of a request that ends well."""
        last = self.end_of(id_)
        assert last.error is None, last.error
        return self.tokens(id_)

    def tokens(self, id_: int) -> list[int]:
        return [token_id for output in self.outputs.get(id_, []) for token_id in output.token_ids]

    def close(self) -> None:
        self.link.close()


@pytest.fixture(scope="module")
def runtime_directories() -> Iterator[Callable[[], Path]]:
    """Makes private directories with paths short enough for a Unix socket."""
    directories: list[Path] = []

    def make() -> Path:
        directories.append(Path(tempfile.mkdtemp(prefix="slipstream-test-")))
        return directories[-1]

    yield make
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def opened(runtime_directories: Callable[[], Path]) -> Iterator[Callable[..., Door]]:
    """Opens doors that are closed, and their engines waited for, after the test."""
    doors: list[Door] = []

    def open_door(config: EngineConfig, directory: Path | None = None) -> Door:
        doors.append(Door(config, directory or runtime_directories()))
        return doors[-1]

    yield open_door
    for door in doors:
        door.close()
    for door in doors:
        wait_until(lambda door=door: not is_running(door.info.pid), "the engine ends after its last door")
        wait_until(lambda door=door: not list(door.directory.glob("*.sock")), "so does the one that replaced it")


@pytest.fixture(scope="module")
def tiny(tiny_llama: Path) -> EngineConfig:
    return make_config(model=str(tiny_llama), grace_seconds=0, num_blocks=64)


@pytest.fixture(scope="module")
def shared(tiny: EngineConfig, runtime_directories: Callable[[], Path]) -> Iterator[tuple[Door, Path]]:
    """One engine for the tests that leave it as it was, its first door, and its runtime directory."""
    directory = runtime_directories()
    door = Door(tiny, directory)
    yield door, directory
    door.close()


@pytest.fixture
def door(shared: tuple[Door, Path]) -> Door:
    shared[0].outputs.clear()
    return shared[0]


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def status(directory: Path, name: str = "tiny") -> dict[str, Any]:
    return control.request(directory / f"{name}.sock", {"type": "status"})


# --- one engine, many doors


def test_answers_equal_those_of_the_same_engine_in_process(door: Door, tiny_llama: Path) -> None:
    """Greedy and drawn, streamed and whole, all at once."""
    sampling = [{"temperature": float(number % 2), "seed": number, "max_tokens": 5 + number} for number in range(6)]
    for number, prompt in enumerate(PROMPTS):
        door.ask(number, prompt, stream=number % 3 > 0, **sampling[number])
    engine = TinyEngine(tiny_llama)
    for number, prompt in enumerate(PROMPTS):
        assert door.answer(number) == engine.answer(prompt, **sampling[number]).token_ids
        assert len(door.outputs[number]) == (5 + number if number % 3 > 0 else 1)
        assert door.end_of(number).finish_reason == "length"


def test_an_iterative_engine_advances_what_each_call_names(opened: Any, tiny: EngineConfig, tiny_llama: Path) -> None:
    door = opened(make_config(model=tiny.model, grace_seconds=0, num_blocks=64, policy="iterative"))
    expected = [TinyEngine(tiny_llama).answer(prompt, max_tokens=3).token_ids for prompt in PROMPTS[:2]]
    door.ask(0, PROMPTS[0], max_tokens=3)
    door.wait_for(lambda: len(door.tokens(0)) == 1)
    parameters = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    door.link.submit([NewRequest(1, PROMPTS[1], parameters, time.monotonic(), True)], advance=[0])
    door.wait_for(lambda: len(door.tokens(0)) == 2 and len(door.tokens(1)) == 1)
    for count in (2, 3):
        door.link.submit([], advance=[1])
        door.wait_for(lambda count=count: len(door.tokens(1)) == count)
    assert len(door.tokens(0)) == 2, "a sequence that was not named was computed"
    door.link.submit([], advance=[0, 1])
    assert [door.answer(0), door.tokens(1)] == expected
    door.wait_for(lambda: door.outputs[1][-1].error == "the sequence has ended")


def test_two_doors_share_one_engine_and_may_use_the_same_ids(
    door: Door, shared: tuple[Door, Path], tiny: EngineConfig
) -> None:
    second = Door(tiny, shared[1])
    assert second.info.pid == door.info.pid
    assert status(shared[1])["doors"] == 2
    door.ask(0, PROMPTS[0])
    second.ask(0, PROMPTS[1], max_tokens=12)
    assert len(door.answer(0)) == 8
    assert len(second.answer(0)) == 12
    second.close()
    wait_until(lambda: status(shared[1])["doors"] == 1, "the engine notices that a door has left")


def test_a_door_that_leaves_takes_its_requests_with_it(
    door: Door, shared: tuple[Door, Path], tiny: EngineConfig
) -> None:
    second = Door(tiny, shared[1])
    for number in range(4):
        second.ask(number, PROMPTS[1], max_tokens=190)
    second.wait_for(lambda: all(second.tokens(number) for number in range(4)))
    second.close()
    wait_until(lambda: status(shared[1])["kv_blocks_used"] == 0, "its blocks come back")
    door.ask(0, PROMPTS[0])
    assert len(door.answer(0)) == 8


def test_a_door_with_another_configuration_is_refused_with_both_fingerprints(
    door: Door, shared: tuple[Door, Path], tiny: EngineConfig
) -> None:
    other = make_config(model=tiny.model, grace_seconds=0, num_blocks=64, max_num_seqs=3)
    with pytest.raises(EngineFailed) as refusal:
        Door(other, shared[1])
    assert tiny.fingerprint in str(refusal.value)
    assert other.fingerprint in str(refusal.value)
    assert "max_num_seqs is 3 here and 16 there" in str(refusal.value)
    door.ask(0, PROMPTS[0])
    assert len(door.answer(0)) == 8


# --- requests


def test_a_cancelled_request_gets_no_token_after_its_end(door: Door, tiny_llama: Path) -> None:
    """CAN-05: what was delivered before is a prefix of the whole answer; cancelling twice changes nothing."""
    door.ask(0, PROMPTS[0], max_tokens=200)
    door.wait_for(lambda: len(door.tokens(0)) >= 3)
    door.link.cancel([0])
    last = door.end_of(0)
    assert (last.finish_reason, last.error_kind, last.error) == (
        "cancelled", messages.CANCELLED, "Request was cancelled",
    )  # fmt: skip
    door.link.cancel([0])
    tokens = door.tokens(0)
    assert tokens == TinyEngine(tiny_llama).answer(PROMPTS[0], max_tokens=200).token_ids[: len(tokens)]
    door.ask(1, PROMPTS[1])
    assert len(door.answer(1)) == 8
    assert door.outputs[0][-1] is last


def test_a_refused_request_takes_nobody_with_it(door: Door) -> None:
    parameters = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    now = time.monotonic()
    door.link.submit(
        [NewRequest(0, [], parameters, now, True), NewRequest(1, [5] * 300, parameters, now, True),
         NewRequest(2, PROMPTS[2], parameters, now, True), NewRequest(2, PROMPTS[3], parameters, now, True)]
    )  # fmt: skip
    assert (door.end_of(0).error_kind, door.end_of(0).error) == (messages.INVALID, "the prompt has no tokens")
    assert door.end_of(1).error_kind == messages.INVALID
    assert "at most 256 are allowed" in str(door.end_of(1).error)
    door.wait_for(lambda: len(door.tokens(2)) == 4)
    refusals = [output for output in door.outputs[2] if output.error is not None]
    assert [(output.error, output.error_kind) for output in refusals] == [
        ("request 2 is still running", messages.INVALID)
    ]


def test_the_leading_door_learns_how_the_engine_fares(door: Door) -> None:
    """Gauges are zero again when the engine goes idle, published at once."""
    door.stats.clear()
    for number, prompt in enumerate(PROMPTS):
        door.ask(number, prompt)
    for number in range(len(PROMPTS)):
        door.answer(number)
    door.wait_for(lambda: door.stats and door.stats[-1].running == 0)
    last = door.stats[-1]
    assert (last.running, last.waiting, last.kv_blocks_used) == (0, 0, 0)
    assert last.kv_blocks_total == 64
    assert max(stats.kv_blocks_peak for stats in door.stats) > 0


def test_a_door_that_fails_over_some_news_still_gets_the_next(
    shared: tuple[Door, Path], tiny: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = Door(tiny, shared[1])
    take, failures = second.take, []

    def fail_once(update: Update) -> None:
        if update.outputs and not failures:
            failures.append(update)
            raise RuntimeError("a door's bug")
        take(update)

    monkeypatch.setattr(second.link, "_on_update", fail_once)
    second.ask(0, PROMPTS[0], max_tokens=5)
    assert len(second.answer(0)) == 4
    second.close()


# --- the control socket


def test_status_says_who_serves_what(shared: tuple[Door, Path], tiny: EngineConfig) -> None:
    answer = status(shared[1])
    expected = {
        "type": "status", "engine": "tiny", "state": "ready", "model": tiny.model, "pid": shared[0].info.pid,
        "running": 0, "waiting": 0, "kv_blocks_used": 0, "kv_blocks_total": 64, "device": "cpu",
        "batch_invariant": True, "reason": None,
    }  # fmt: skip
    assert {key: answer[key] for key in expected} == expected
    assert control.list_engines(shared[1]) == [shared[1] / "tiny.sock"]


def test_step_records_can_be_fetched(door: Door, shared: tuple[Door, Path]) -> None:
    door.ask(0, PROMPTS[0], max_tokens=5)
    door.answer(0)
    records = control.request(shared[1] / "tiny.sock", {"type": "records", "last": 5})["records"]
    assert [record["sampled_rows"] for record in records] == [1] * 5
    assert records[0]["prefill_rows"] + records[0]["decode_rows"] == len(PROMPTS[0])


@pytest.mark.parametrize(
    "message",
    [
        {"type": "nonsense"},
        {},
        {"type": "records", "last": "many"},
        {"type": "drain", "timeout_s": "soon"},
        {"type": "records", "last": float("inf")},
        {"type": "door"},
        {"type": "door", "identity": "no hex", "fingerprint": "", "config": {}},
        {"type": "door", "identity": "00", "fingerprint": "", "config": []},
    ],
    ids=str,
)
def test_a_message_that_is_none_is_answered_with_an_error(
    door: Door, shared: tuple[Door, Path], message: dict[str, Any]
) -> None:
    """And the engine goes on."""
    answer = control.request(shared[1] / "tiny.sock", message)
    assert answer["type"] == "error"
    assert answer["reason"]
    assert status(shared[1])["state"] == "ready"
    door.ask(0, PROMPTS[0])
    assert len(door.answer(0)) == 8


def test_an_idle_engine_costs_no_processor_time(door: Door, shared: tuple[Door, Path]) -> None:
    """Less than a tenth of a second of it in one second of the clock."""
    door.ask(0, PROMPTS[0])
    door.answer(0)
    wait_until(lambda: status(shared[1])["running"] == 0, "the engine is idle")
    process = psutil.Process(door.info.pid)
    before = sum(process.cpu_times()[:2])
    time.sleep(1.0)  # the span that is measured
    assert sum(process.cpu_times()[:2]) - before < 0.1


# --- life and death


def test_a_killed_engine_is_reported_at_once_and_comes_back_by_itself(opened: Any, tiny: EngineConfig) -> None:
    door = opened(tiny)
    first = door.info.pid
    door.ask(0, PROMPTS[1])
    expected = door.answer(0)
    door.ask(1, PROMPTS[0], max_tokens=200)
    door.wait_for(lambda: door.tokens(1))
    os.kill(first, signal.SIGKILL)
    door.wait_for(lambda: door.downs)
    assert door.downs == ["engine 'tiny' died and is being started again"]
    assert not door.link.up
    with pytest.raises(Unavailable, match="the engine is not up: engine 'tiny' died and is being started again"):
        door.ask(2, PROMPTS[1])
    door.link.cancel([1])
    wait_until(lambda: door.link.up, "the engine is back")
    door.ask(3, PROMPTS[1])
    assert door.answer(3) == expected
    assert door.outputs[1][-1].finish_reason is None, "the request that died with the engine was answered"
    assert status(door.directory)["pid"] != first


def test_an_engine_outlives_its_last_door_by_the_grace_and_leaves_nothing(
    opened: Any, tiny: EngineConfig, runtime_directories: Callable[[], Path]
) -> None:
    config = make_config(model=tiny.model, grace_seconds=2, num_blocks=64)
    directory = runtime_directories()
    first = opened(config, directory)
    first.close()
    second = opened(config, directory)
    assert second.info.pid == first.info.pid, "a door that comes within the grace finds another engine"
    left = time.monotonic()
    second.close()
    wait_until(lambda: not is_running(first.info.pid), "the engine ends after its last door")
    assert time.monotonic() - left >= 2
    assert [path.name for path in directory.iterdir()] == ["tiny.lock"]


def test_a_drained_engine_finishes_what_runs_and_refuses_the_rest(opened: Any, tiny: EngineConfig) -> None:
    door = opened(make_config(model=tiny.model, grace_seconds=0, num_blocks=64, max_num_seqs=1))
    door.ask(0, PROMPTS[0], max_tokens=200)
    door.ask(1, PROMPTS[1])
    door.wait_for(lambda: door.tokens(0))
    answers: list[dict[str, Any]] = []
    path = door.directory / "tiny.sock"
    drain = {"type": "drain", "timeout_s": 60}
    client = threading.Thread(target=lambda: answers.append(control.request(path, drain, timeout_s=PATIENCE_S)))
    client.start()
    assert (door.end_of(1).error_kind, door.end_of(1).error) == (
        messages.UNAVAILABLE, "the server is shutting down",
    )  # fmt: skip
    door.ask(2, PROMPTS[1])
    assert door.end_of(2).error_kind == messages.UNAVAILABLE
    assert len(door.answer(0)) == 200
    client.join(PATIENCE_S)
    assert answers == [{"type": "drained", "finished": 1, "aborted": 1}]
    assert status(door.directory)["state"] == "draining"


def test_two_runtime_directories_are_two_engines_and_a_drain_ends_what_takes_too_long_in_one(
    door: Door, shared: tuple[Door, Path], opened: Any, tiny: EngineConfig
) -> None:
    other = opened(tiny)
    assert other.info.pid != door.info.pid
    for each in (door, other):
        each.ask(0, PROMPTS[0], max_tokens=250)
    other.wait_for(lambda: other.tokens(0))
    answer = control.request(other.directory / "tiny.sock", {"type": "drain", "timeout_s": 0}, timeout_s=PATIENCE_S)
    assert answer == {"type": "drained", "finished": 0, "aborted": 1}
    assert other.end_of(0).error == "the server is shutting down and the request did not end in time"
    assert other.end_of(0).error_kind == messages.UNAVAILABLE
    assert len(door.answer(0)) == 250
    assert status(shared[1])["state"] == "ready"


def test_an_engine_that_cannot_load_its_model_says_why(
    runtime_directories: Callable[[], Path], tiny_llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(EngineFailed) as failure:
        Door(make_config(model=str(tiny_llama), max_model_len=1000), runtime_directories())
    assert "max_model_len is 1000; the model allows at most 256" in str(failure.value)


def test_relative_paths_are_those_of_the_server(
    opened: Any, tiny_llama: Path, runtime_directories: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model folder and a runtime directory, as a user types them where the server is started."""
    directory = runtime_directories()
    monkeypatch.chdir(directory.parent)
    config = make_config(model=os.path.relpath(tiny_llama), grace_seconds=0, num_blocks=64)
    door = opened(config, Path(directory.name))
    door.ask(0, PROMPTS[0])
    assert len(door.answer(0)) == 8
