"""An engine in a process of its own: the same answers as in-process, and clear words when it dies."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from deadline import wait_until
from door import Door
from slipstream.config import EngineConfig
from slipstream.engine.link import EngineFailed, EngineLink
from slipstream.errors import Unavailable
from slipstream_client import control
from tiny_model import TinyEngine, make_config, make_prompts

PROMPTS = make_prompts(6)


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


@pytest.fixture(scope="module")
def tiny(tiny_llama: Path) -> EngineConfig:
    return make_config(model=str(tiny_llama), grace_seconds=0, num_blocks=64)


@pytest.fixture(scope="module")
def door(tiny: EngineConfig, runtime_directories: Callable[[], Path]) -> Iterator[Door]:
    """A door of the engine that all tests share which leave it as it was."""
    door = Door(tiny, runtime_directories())
    yield door
    door.link.close()
    wait_until(lambda: not psutil.pid_exists(door.info.pid), "the engine ends after its last door")


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


def test_two_doors_share_one_process(door: Door, tiny: EngineConfig) -> None:
    second = Door(tiny, door.directory)
    assert second.info.pid == door.info.pid != os.getpid()
    second.ask(0, PROMPTS[1], max_tokens=12)
    assert len(second.answer(0)) == 12
    second.link.close()


def test_status_says_who_serves_what(door: Door, tiny: EngineConfig) -> None:
    answer = door.status()
    expected = {
        "type": "status",
        "engine": "tiny",
        "state": "ready",
        "model": tiny.model,
        "pid": door.info.pid,
        "kv_blocks_total": 64,
        "device": "cpu",
        "batch_invariant": True,
        "reason": None,
    }
    assert {key: answer[key] for key in expected} == expected
    assert control.list_engines(door.directory) == [door.directory / "tiny.sock"]


def test_an_idle_engine_costs_no_processor_time(door: Door) -> None:
    """Less than a tenth of a second of it in one second of the clock."""
    door.ask(100, PROMPTS[0])
    door.answer(100)
    process = psutil.Process(door.info.pid)
    before = sum(process.cpu_times()[:2])
    time.sleep(1.0)  # the span that is measured
    assert sum(process.cpu_times()[:2]) - before < 0.1


def test_a_killed_engine_is_reported_at_once_and_comes_back_by_itself(
    door: Door, tiny: EngineConfig, runtime_directories: Callable[[], Path]
) -> None:
    """The engine of another runtime directory with the same name and configuration does not notice."""
    victim = Door(tiny, runtime_directories())
    first = victim.info.pid
    assert first != door.info.pid
    victim.ask(0, PROMPTS[1])
    expected = victim.answer(0)
    victim.ask(1, PROMPTS[0], max_tokens=250)
    victim.wait_for(lambda: victim.tokens(1))
    os.kill(first, signal.SIGKILL)
    victim.wait_for(lambda: victim.downs)
    assert victim.downs == ["engine 'tiny' died and is being started again"]
    with pytest.raises(Unavailable, match="the engine is not up: engine 'tiny' died and is being started again"):
        victim.ask(2, PROMPTS[1])
    victim.link.cancel([1])
    door.ask(200, PROMPTS[1])
    assert door.answer(200) == expected

    wait_until(lambda: victim.link.up, "the engine is back")
    victim.ask(3, PROMPTS[1])
    assert victim.answer(3) == expected
    assert victim.outputs[1][-1].finish_reason is None, "the request that died with the engine was answered"
    second = victim.status()["pid"]
    assert second not in (first, door.info.pid)
    victim.link.close()
    wait_until(lambda: not psutil.pid_exists(second), "the engine ends after its last door")
    assert [path.name for path in victim.directory.iterdir()] == ["tiny.lock"]


def test_a_cancel_that_meets_the_engines_end_changes_nothing(
    tiny: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads of a door that watch for clients must outlive it, though the engine was up when they looked."""
    link = EngineLink(tiny, tmp_path, on_update=print, on_down=print)
    monkeypatch.setattr(EngineLink, "up", True)
    link.cancel([1])
    link.finish([2])
    with pytest.raises(Unavailable, match="has not started"):
        link.submit([])
    link.close()


def test_an_engine_that_cannot_serve_its_model_says_why(
    tiny_llama: Path, runtime_directories: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is the model's own, so the folder was found: relative paths are those of where the server runs."""
    directory = runtime_directories()
    monkeypatch.chdir(directory.parent)
    config = make_config(model=os.path.relpath(tiny_llama), max_model_len=1000)
    with pytest.raises(EngineFailed, match="max_model_len is 1000; the model allows at most 256"):
        Door(config, Path(directory.name))
