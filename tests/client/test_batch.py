"""`slipstream batch` against a scripted server: what it sends, keeps, survives and goes on with."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from fake_triton import Fail, FakeTriton, Received, Say, Wait, answer, ids_of_request, interrupt_when
from slipstream_client import cli
from slipstream_client.errors import SlipstreamError
from slipstream_client.offline.output_file import OutputFile, RequestLog
from slipstream_client.server.ports import free_ports

SLIPSTREAM = [sys.executable, "-c", "from slipstream_client.cli import main; main()"]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream_client.offline.runner.LONGEST_PAUSE_S", 0.01)


class Files:
    """The input, the output and the log of a batch."""

    def __init__(self, folder: Path) -> None:
        self.input, self.output, self.log = (folder / name for name in ("in.jsonl", "out.jsonl", "out.log.jsonl"))

    def ask(self, *requests: dict[str, Any]) -> None:
        self.input.write_text("".join(json.dumps(request) + "\n" for request in requests))

    def ask_for(self, count: int) -> list[str]:
        """So many requests whose texts, and so answers, all differ."""
        self.ask(*({"id": f"r{index}", "prompt": "x" * (index + 1), "stop_length": 2} for index in range(count)))
        return [f"r{index}" for index in range(count)]

    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]

    def ids(self) -> list[str]:
        return sorted(answer["id"] for answer in self.answers())

    def texts(self) -> dict[str, str]:
        return {answer["id"]: answer["text"] for answer in self.answers()}

    def attempts(self) -> list[tuple[str, int, str | None]]:
        lines = (json.loads(line) for line in self.log.read_text().splitlines())
        return [(line["id"], line["attempt"], line["error_code"]) for line in lines]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def arguments(url: str, files: Files, *more: str) -> list[str]:
    return ["batch", str(files.input), str(files.output), "--url", url, *more]


def batch(triton: FakeTriton, files: Files, *more: str) -> Any:
    return CliRunner().invoke(cli.make_app([]), arguments(triton.url, files, *more))


def test_every_request_is_answered_in_a_line_and_logged(triton: FakeTriton, files: Files) -> None:
    files.ask(
        {"id": "a", "prompt": "hello", "stop_length": 3},
        {"prompt": "x", "sampling_parameters": {"stop_length": 1, "temperature": 0}},
        {"id": "ids", "input_ids": [4, 5], "stop_length": 2},
        {"id": "chat", "messages": [{"role": "user", "content": "hi"}], "stop_length": 1},
    )
    result = batch(triton, files)
    assert result.exit_code == 0, result.output
    assert files.texts() == {"a": " 5 6 7", "line-2": " 1", "ids": " 0 1", "chat": " 0"}
    first = next(answer for answer in files.answers() if answer["id"] == "a")
    assert (first["finish_reason"], first["num_input_tokens"], first["num_output_tokens"]) == ("stop", 7, 3)
    assert sorted(files.attempts()) == [(id_, 1, None) for id_ in sorted(files.texts())]
    line = json.loads(files.log.read_text().splitlines()[0])
    assert (line["num_input_tokens"], line["ended"] >= line["started"]) == (7, True)
    sent = {received.id: received for received in triton.received}
    assert sent["line-2"].sampling == [{"stop_length": 1, "temperature": 0}]
    assert sent["ids"].inputs["input_ids"] == ([2], b"\x04\0\0\0\x05\0\0\0")
    assert sent["chat"].sampling[0]["messages"] == [{"role": "user", "content": "hi"}]
    assert "4 answered, 0 failed, 0 ended before, 0 left; 7 tokens in" in result.stdout


def test_openai_lines_get_openai_answers(triton: FakeTriton, files: Files) -> None:
    body = {"model": "m", "prompt": "abc", "stop_length": 2}
    files.ask({"custom_id": "c1", "method": "POST", "url": "/v1/completions", "body": body})
    assert batch(triton, files).exit_code == 0
    (line,) = files.answers()
    assert (line["custom_id"], line["error"], line["response"]["status_code"]) == ("c1", None, 200)
    assert line["response"]["body"]["choices"][0]["text"] == " 3 4"
    assert line["response"]["body"]["model"] == "m"
    assert batch(triton, files).exit_code == 0
    assert len(triton.received) == 1, "a resume reads it back"


def test_no_more_requests_than_wanted_are_in_flight(triton: FakeTriton, files: Files) -> None:
    files.ask_for(12)
    triton.script = lambda received: [Wait(0.02), *answer(ids_of_request(received))]
    assert batch(triton, files, "--concurrency", "3").exit_code == 0
    assert triton.most_in_flight == 3
    assert len(files.answers()) == 12


def test_nothing_is_sent_of_a_file_with_a_bad_line(triton: FakeTriton, files: Files) -> None:
    good = '{"prompt": "x", "stop_length": 1}\n'
    bad = [f'{{"prompt": "x", "top_p": {number}}}\n' for number in range(2, 14)]
    files.input.write_text(good + "\n" + "".join(bad) + good)
    result = batch(triton, files)
    assert isinstance(result.exception, SlipstreamError)
    assert str(result.exception) == f"{files.input} was not sent: 12 of its lines cannot be (listed above)"
    faults = result.stderr.splitlines()
    assert faults[0] == f"{files.input}:3: top_p is 2; allowed are numbers from 0 to 1"
    assert len(faults) == 10
    assert triton.received == []
    assert not files.output.exists()


def test_two_requests_with_one_id_are_refused(triton: FakeTriton, files: Files) -> None:
    files.ask({"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x"}, {"id": "a", "prompt": "y"})
    result = batch(triton, files)
    assert result.stderr.splitlines() == [f"{files.input}:3: id 'a' stands in line 1 already"]
    assert triton.received == []


def test_what_a_model_does_not_take_is_refused_before_anything_is_sent(triton: FakeTriton, files: Files) -> None:
    files.ask({"prompt": "x", "stop_length": 1}, {"prompt": "x", "stop": "a"}, {"input_ids": [1]})
    result = batch(triton, files, "--batcher", "dynamic")
    assert str(result.exception).startswith(f"{files.input}:2: stop is not taken by dynamic")
    assert triton.received == []


@pytest.mark.parametrize("batcher", ["continuous", "continuous_unary", "iterative", "dynamic", "static"])
def test_every_batcher_gives_the_answers(triton: FakeTriton, files: Files, batcher: str) -> None:
    files.ask_for(5)
    result = batch(triton, files, "--batcher", batcher, "--concurrency", "3")
    assert result.exit_code == 0, result.output
    assert files.texts() == {f"r{index}": f" {index + 1} {index + 2}" for index in range(5)}
    assert {received.model for received in triton.received} == {batcher}
    if batcher == "static":
        assert [len(received.texts) for received in triton.received] == [3, 2]


def test_one_bad_row_does_not_take_its_batch_with_it(triton: FakeTriton, files: Files) -> None:
    files.ask_for(3)

    def script(received: Received) -> list[Say | Fail | Wait]:
        bad = received.text == "xx"
        return [Fail("too long", grpc.StatusCode.INVALID_ARGUMENT)] if bad else answer(ids_of_request(received))

    triton.script = script
    assert batch(triton, files, "--batcher", "static").exit_code == 1
    assert files.ids() == ["r0", "r1", "r2"]
    assert [answer["id"] for answer in files.answers() if "error" in answer] == ["r1"]
    assert [len(received.texts) for received in triton.received] == [3, 1, 1, 1]


def failing(times: dict[str, int], code: grpc.StatusCode) -> Any:
    """A script in which a request fails so often before it is answered."""

    def script(received: Received) -> list[Say | Fail | Wait]:
        if received.attempt < times.get(received.id, 0):
            return [Fail("not now", code)]
        return answer(ids_of_request(received))

    return script


def test_a_refused_request_is_sent_again_until_it_is_answered(triton: FakeTriton, files: Files) -> None:
    files.ask_for(3)
    triton.script = failing({"r1": 2}, grpc.StatusCode.UNAVAILABLE)
    result = batch(triton, files)
    assert result.exit_code == 0
    assert files.ids() == ["r0", "r1", "r2"]
    r1 = [attempt for attempt in files.attempts() if attempt[0] == "r1"]
    assert r1 == [("r1", 1, "UNAVAILABLE"), ("r1", 2, "UNAVAILABLE"), ("r1", 3, None)]
    assert "2 retries" in result.stdout


def test_a_request_that_takes_too_long_is_sent_again(triton: FakeTriton, files: Files) -> None:
    files.ask_for(1)
    triton.script = lambda received: [*([] if received.attempt else [Wait(20.0)]), *answer(ids_of_request(received))]
    assert batch(triton, files, "--timeout", "0.3").exit_code == 0
    assert files.attempts() == [("r0", 1, "DEADLINE_EXCEEDED"), ("r0", 2, None)]


def test_what_has_failed_for_good_is_kept_and_not_sent_again_unless_told(triton: FakeTriton, files: Files) -> None:
    files.ask_for(3)
    triton.script = failing({"r1": 1}, grpc.StatusCode.INVALID_ARGUMENT)
    result = batch(triton, files)
    assert result.exit_code == 1
    assert "failed: r1: not now (INVALID_ARGUMENT)" in result.stderr
    (failed,) = (answer for answer in files.answers() if "error" in answer)
    assert failed["error"] == {"code": "INVALID_ARGUMENT", "message": "not now"}
    assert batch(triton, files).exit_code == 1
    assert len(triton.received) == 3
    assert batch(triton, files, "--retry-failed").exit_code == 0
    assert [received.id for received in triton.received[3:]] == ["r1"]
    assert files.ids() == ["r0", "r1", "r2"]
    assert files.texts()["r1"] == " 2 3"


def test_a_failure_that_may_mend_itself_is_sent_again_by_a_resume(triton: FakeTriton, files: Files) -> None:
    files.ask_for(3)
    triton.script = failing({"r1": 3}, grpc.StatusCode.UNAVAILABLE)
    assert batch(triton, files, "--retries", "1").exit_code == 1
    assert [answer["id"] for answer in files.answers() if "error" in answer] == ["r1"]
    assert batch(triton, files, "--retries", "1").exit_code == 0
    assert Counter(received.id for received in triton.received) == {"r0": 1, "r1": 4, "r2": 1}
    assert files.ids() == ["r0", "r1", "r2"]


def test_a_changed_request_is_not_taken_for_the_answered_one(triton: FakeTriton, files: Files) -> None:
    files.ask({"id": "a", "prompt": "x", "stop_length": 1}, {"id": "b", "prompt": "y", "stop_length": 1})
    assert batch(triton, files).exit_code == 0
    files.ask({"id": "b", "stop_length": 1, "prompt": "y"}, {"id": "a", "prompt": "changed", "stop_length": 1})
    result = batch(triton, files)
    assert str(result.exception).startswith(f"'a' was answered in {files.output}, and its request has changed since")
    files.ask({"id": "b", "stop_length": 1, "prompt": "y"}, {"id": "a", "prompt": "x", "stop_length": 1})
    assert batch(triton, files).exit_code == 0, "order and spelling are no change"
    refused = str(batch(triton, files, "--max-tokens", "5").exception)
    assert re.match("'[ab]' was answered", refused), "both have changed; which is found first is that which ended first"
    assert len(triton.received) == 2


def test_a_failed_request_may_be_mended_and_sent_again(triton: FakeTriton, files: Files) -> None:
    triton.script = lambda received: (
        [Fail("too long", grpc.StatusCode.INVALID_ARGUMENT)] if received.text == "bad" else answer([1])
    )
    files.ask({"id": "a", "prompt": "bad"})
    assert batch(triton, files).exit_code == 1
    files.ask({"id": "a", "prompt": "good"})
    assert "--retry-failed sends it again" in str(batch(triton, files).exception)
    assert batch(triton, files, "--retry-failed").exit_code == 0
    assert files.texts() == {"a": " 1"}


def test_an_output_of_another_batch_is_left_alone(triton: FakeTriton, files: Files) -> None:
    files.ask({"id": "a", "prompt": "x", "stop_length": 1})
    assert batch(triton, files).exit_code == 0
    content = files.output.read_bytes()
    files.ask({"id": "b", "prompt": "x", "stop_length": 1})
    assert "answers 'a', which" in str(batch(triton, files).exception)
    assert files.output.read_bytes() == content


@pytest.mark.parametrize("content", [b"my notes", b"my notes\n", b'{"id": "a"}\n', b"5\n", b'{"id": "a"}'])
def test_a_file_that_is_no_output_of_a_batch_is_left_alone(triton: FakeTriton, files: Files, content: bytes) -> None:
    files.ask_for(1)
    files.output.write_bytes(content)
    result = batch(triton, files)
    if content == b'{"id": "a"}':  # may be what was left of a line of ours; nothing else is lost with it
        assert result.exit_code == 0
        return
    assert str(result.exception) == f"{files.output}:1 is no line of a batch's output"
    assert files.output.read_bytes() == content
    assert triton.received == []


def test_three_files_must_be_three(triton: FakeTriton, files: Files) -> None:
    files.ask_for(1)
    for more in (
        [str(files.input), str(files.input)],
        [str(files.input), str(files.output), "--log", str(files.output)],
    ):
        result = CliRunner().invoke(cli.make_app([]), ["batch", *more, "--url", triton.url])
        assert str(result.exception) == "requests, answers and log need three different files"


@pytest.mark.parametrize("name", ["", ".", "/"])
def test_answers_without_a_file_name_are_refused(files: Files, name: str) -> None:
    files.ask_for(1)
    result = CliRunner().invoke(cli.make_app([]), ["batch", str(files.input), name, "--url", "127.0.0.1:1"])
    assert str(result.exception) == f"{Path(name)} is no file"


def test_outputs_that_differ_in_their_ending_have_a_log_each(triton: FakeTriton, files: Files) -> None:
    files.ask_for(1)
    for ending in ("a", "b"):
        output = files.output.with_suffix(f".{ending}")
        result = CliRunner().invoke(cli.make_app([]), ["batch", str(files.input), str(output), "--url", triton.url])
        assert result.exit_code == 0, result.output
        assert len(Path(f"{output}.log.jsonl").read_text().splitlines()) == 1
    assert not files.log.exists()


def test_a_log_may_go_to_a_pipe(files: Files) -> None:
    os.mkfifo(files.log)
    with contextlib.closing(RequestLog(files.log)) as log:
        reader = os.open(files.log, os.O_RDONLY)
        log.append({"id": "a"})
        assert os.read(reader, 100) == b'{"id": "a"}\n'
        os.close(reader)


def test_another_batch_on_the_same_output_is_refused(triton: FakeTriton, files: Files) -> None:
    files.ask_for(1)
    with files.output.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert str(batch(triton, files).exception) == f"another batch writes to {files.output}"
    assert batch(triton, files).exit_code == 0


def test_taking_lines_out_keeps_the_lock(triton: FakeTriton, files: Files) -> None:
    files.ask_for(2)
    assert batch(triton, files).exit_code == 0
    with contextlib.closing(OutputFile(files.output)) as output:
        output.drop({"r0"})
        assert files.ids() == ["r1"]
        with pytest.raises(SlipstreamError, match="another batch writes to"):
            OutputFile(files.output)
        output.append({"id": "r0", "text": "", "request": ""})
        assert files.ids() == ["r0", "r1"]
    assert [path.name for path in files.output.parent.iterdir() if path.name.startswith(".")] == []


def test_wherever_the_last_line_was_cut_short_a_resume_answers_each_request_once(
    triton: FakeTriton, files: Files
) -> None:
    """As kill -9 or a full disk may leave it; the test below has every byte of a file."""
    ids = files.ask_for(3)
    assert batch(triton, files, "--concurrency", "1").exit_code == 0
    whole, expected = files.output.read_bytes(), files.texts()
    *_, last = whole.splitlines(keepends=True)
    for length in (0, 1, 8, len(last) // 2, len(last) - 2, len(last) - 1):
        triton.received.clear()
        files.output.write_bytes(whole[: len(whole) - len(last) + length])
        assert batch(triton, files).exit_code == 0
        # One whose line lacks nothing but its end is answered.
        assert [received.id for received in triton.received] == ([] if length == len(last) - 1 else ["r2"]), length
        assert files.ids() == ids
        assert files.texts() == expected


def test_wherever_an_output_ends_what_is_whole_in_it_is_kept(files: Files, triton: FakeTriton) -> None:
    files.ask_for(4)
    assert batch(triton, files, "--concurrency", "1").exit_code == 0
    whole = files.output.read_bytes()
    ends = [position for position, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(len(whole) + 1):
        files.output.write_bytes(whole[:length])
        with contextlib.closing(OutputFile(files.output)) as output:
            answered = list(output.read())
        kept = sum(end <= length for end in ends)
        assert answered == [f"r{index}" for index in range(kept)]
        assert files.output.read_bytes() == whole[: ends[kept - 1] + 1 if kept else 0]


def test_a_log_that_was_cut_short_goes_on_in_a_line_of_its_own(files: Files) -> None:
    for content in ('{"id": "a"}\n{"id": "b", "att', '{"id": "a"}\n{"i', '{"id": "a"}\n'):
        files.log.write_text(content)
        with contextlib.closing(RequestLog(files.log)) as log:
            log.append({"id": "c"})
        assert files.log.read_text() == '{"id": "a"}\n{"id": "c"}\n'
    files.log.write_text("my notes")
    with contextlib.closing(RequestLog(files.log)) as log:
        log.append({"id": "c"})
    assert files.log.read_text() == 'my notes\n{"id": "c"}\n'


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("answered", [0, 1, 4])
def test_interrupted_it_cancels_what_runs_and_a_resume_does_the_rest(
    triton: FakeTriton, files: Files, number: signal.Signals, answered: int
) -> None:
    ids = files.ask_for(6)
    others_wait = threading.Event()
    waiting: list[str] = []

    def script(received: Received) -> list[Say | Fail | Wait]:
        if int(received.id[1:]) < answered:
            return answer(ids_of_request(received))
        waiting.append(received.id)
        if len(waiting) == 2:  # so all before them were answered
            others_wait.set()
        return [Wait(20.0), *answer(ids_of_request(received))]

    triton.script = script
    with interrupt_when(others_wait, number=number):
        result = batch(triton, files, "--concurrency", "2")
    assert result.exit_code == 130, result.output
    assert files.output.exists()
    before = files.ids()
    assert before == ids[:answered]
    assert "interrupted: the same command goes on from here" in result.stderr
    deadline = time.monotonic() + 10
    while len(triton.cancelled) < 2:
        assert time.monotonic() < deadline, "requests in flight were not cancelled at the server"
        time.sleep(0.01)
    assert [attempt[2] for attempt in files.attempts()].count("CANCELLED") == 2
    triton.received.clear()
    triton.script = lambda received: answer(ids_of_request(received))
    assert batch(triton, files).exit_code == 0
    assert sorted(received.id for received in triton.received) == ids[answered:]
    assert files.ids() == ids


def test_killed_at_any_time_it_loses_nothing_and_answers_nothing_twice(triton: FakeTriton, files: Files) -> None:
    ids = files.ask_for(30)
    triton.script = lambda received: answer(ids_of_request(received), gap_s=0.05)
    kills = 0
    command = [*SLIPSTREAM, *arguments(triton.url, files, "--concurrency", "3")]
    for answers in (1, 15):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and (
            not files.output.exists() or len(files.output.read_bytes().splitlines()) < answers
        ):
            time.sleep(0.005)
        kills += process.poll() is None
        process.kill()
        process.wait()
    assert kills == 2
    before = Counter(received.id for received in triton.received)
    assert sum(before.values()) <= 30 + 2 * 3, "only what was in flight is sent again"
    assert batch(triton, files).exit_code == 0
    assert files.ids() == sorted(ids)
    assert files.texts() == {id_: f" {index + 1} {index + 2}" for index, id_ in enumerate(ids)}


def test_a_server_that_is_started_again_is_waited_for(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream_client.offline.runner.LONGEST_PAUSE_S", 0.2)
    ids = files.ask_for(6)
    (port,) = free_ports(1)
    # Two are in flight at a time: once the third and the fourth are, the first two have been answered.
    hang = threading.Barrier(3)

    def hanging(received: Received) -> list[Say | Fail | Wait]:
        if received.id in ("r0", "r1"):
            return answer(ids_of_request(received))
        hang.wait(20)
        return [Wait(20.0)]

    with FakeTriton(port) as first, contextlib.ExitStack() as later:
        first.script = hanging
        second = []

        def restart() -> None:
            hang.wait(20)
            first.__exit__()
            second.append(later.enter_context(FakeTriton(port)))

        restarting = threading.Thread(target=restart)
        restarting.start()
        result = batch(first, files, "--concurrency", "2", "--retries", "60")
        restarting.join()
    assert result.exit_code == 0, result.output
    assert files.ids() == ids
    assert sorted(received.id for received in second[0].received) == ids[2:]
    assert {code for _, _, code in files.attempts()} >= {None, "UNAVAILABLE"}


def test_a_server_that_is_gone_ends_the_batch_and_nothing_is_written_off(files: Files) -> None:
    ids = files.ask_for(5)
    with FakeTriton() as triton:

        def script(received: Received) -> list[Say | Fail | Wait]:
            if received.id == "r1":
                threading.Thread(target=triton.__exit__, daemon=True).start()
                return [Wait(20.0)]
            return answer(ids_of_request(received))

        triton.script = script
        result = batch(triton, files, "--concurrency", "1", "--retries", "5")
    assert str(result.exception) == f"no server answers at {triton.url} (UNAVAILABLE)"
    assert files.ids() == ["r0"]
    with FakeTriton() as another:
        assert batch(another, files).exit_code == 0
        assert sorted(received.id for received in another.received) == ids[1:]
    assert files.ids() == ids


def test_nobody_at_the_address_is_said_at_once(files: Files) -> None:
    files.ask_for(1)
    (port,) = free_ports(1)
    ended = subprocess.run(
        [*SLIPSTREAM, *arguments(f"127.0.0.1:{port}", files)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.splitlines()[1:] == [f"slipstream: no server answers at 127.0.0.1:{port} (UNAVAILABLE)"]


def test_a_full_disk_leaves_whole_lines_and_a_resume_does_the_rest(triton: FakeTriton, files: Files) -> None:
    ids = files.ask_for(6)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))  # some three lines and a half
        result = batch(triton, files, "--concurrency", "1", "--log", "/dev/null")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert str(result.exception).startswith(f"cannot write to {files.output}: ")
    kept = files.ids()
    assert 1 <= len(kept) < 6
    assert files.output.read_bytes().endswith(b"\n")
    assert batch(triton, files).exit_code == 0
    assert files.ids() == ids
    assert Counter(received.id for received in triton.received)[ids[len(kept)]] == 2, "its answer found no room"


def test_an_input_that_changes_while_it_is_sent_ends_the_batch(triton: FakeTriton, files: Files) -> None:
    files.ask_for(400)  # more than is read at once

    def script(received: Received) -> list[Say | Fail | Wait]:
        files.ask(*({"id": f"r{index}", "prompt": "another"} for index in range(400)))
        return answer(ids_of_request(received))

    triton.script = script
    assert "has changed since it was checked" in str(batch(triton, files, "--concurrency", "4").exception)
    assert len(triton.received) < 400


def test_lines_tell_the_progress_where_there_is_no_terminal(
    triton: FakeTriton, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream_client.offline.progress._LINE_EVERY_S", 0.0)
    files.ask_for(2)
    result = batch(triton, files, "--concurrency", "1")
    lines = result.stderr.splitlines()
    assert lines[0] == f"2 requests, 0 of them ended before; log: {files.log}"
    assert [line.split(",")[0] for line in lines[1:]] == ["1 of 2 requests", "2 of 2 requests"]


def test_json_is_the_summary_alone(triton: FakeTriton, files: Files) -> None:
    files.ask_for(2)
    summary = json.loads(batch(triton, files, "--json").stdout)
    counts: Sequence[str] = ("requests", "answered", "answered_before", "failed", "left", "retries", "output_tokens")
    assert [summary[name] for name in counts] == [2, 2, 0, 0, 0, 0, 4]
    summary = json.loads(batch(triton, files, "--json").stdout)
    assert [summary[name] for name in counts] == [2, 0, 2, 0, 0, 0, 0]
