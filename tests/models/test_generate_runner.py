"""`executor: transformers`: generate() behind our scheduler and sampler, a forward pass a step, and nothing left of it.

The tiny model's best two logits lie far further apart than float32 rounds, so its greedy tokens can be compared.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Cache, GenerationConfig, LlamaConfig

from slipstream.engine.request import Request
from slipstream.errors import ConfigError
from slipstream.models.generate_runner import GenerateRunner
from tiny_model import (
    KV_VALUES_PER_TOKEN,
    SHAPE,
    TinyEngine,
    load_reference,
    make_config,
    make_prompts,
    save_tiny_model,
)

PROMPTS = make_prompts(5)
NUMBERS = range(len(PROMPTS))


def generate_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "generate"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Whatever happened to the groups of a test, their calls end by themselves."""
    assert generate_threads() == []
    yield
    for thread in generate_threads():
        thread.join(timeout=30)
    assert generate_threads() == []


def transformers_engine(folder: Path, **fields: Any) -> TinyEngine:
    return TinyEngine(folder, policy="lockstep", executor="transformers", **fields)


def native_engine(folder: Path, **fields: Any) -> TinyEngine:
    return TinyEngine(folder, policy="lockstep", weights="fp32", **fields)


def plain_generate(folder: Path, prompts: list[list[int]], **generation: Any) -> list[list[int]]:
    """The new tokens of each row, as a user of transformers gets them."""
    longest = max(map(len, prompts))
    model: Any = load_reference(folder)
    model.generation_config = GenerationConfig()
    output = model.generate(
        torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts]),
        attention_mask=torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
        generation_config=GenerationConfig(do_sample=False, pad_token_id=0, **generation),
    )
    return output[:, longest:].tolist()


def cache_of(arguments: dict[str, Any]) -> weakref.ref[Cache]:
    """The KV cache among a forward pass's arguments; its name differs between versions."""
    (cache,) = (value for value in arguments.values() if isinstance(value, Cache))
    return weakref.ref(cache)


def wrap_forward(engine: TinyEngine, before: Callable[[dict[str, Any]], None]) -> None:
    """Call `before` with the arguments of every forward pass."""
    forward = engine.runner.model.forward

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before(kwargs)
        return forward(*args, **kwargs)

    engine.runner.model.forward = wrapped


# --- the same tokens


def test_a_single_row_gets_the_tokens_of_a_plain_generate(tiny_llama: Path) -> None:
    answer = transformers_engine(tiny_llama).answer(PROMPTS[1], max_tokens=20)
    assert [answer.token_ids] == plain_generate(tiny_llama, [PROMPTS[1]], max_new_tokens=20)
    assert answer.finish_reason == "length"


def test_a_padded_batch_gets_the_tokens_of_a_plain_generate(tiny_llama: Path) -> None:
    engine = transformers_engine(tiny_llama)
    for number, prompt in enumerate(PROMPTS):
        engine.start(number, prompt, max_tokens=20)
    answers = engine.run()
    expected = plain_generate(tiny_llama, PROMPTS, max_new_tokens=20)
    assert [answers[number].token_ids for number in NUMBERS] == expected


def test_rows_that_ended_are_fed_what_generate_feeds_them(tiny_llama: Path) -> None:
    """A token that ends one row early is end-of-sequence for a plain generate(), which pads that row from then on."""
    unended = plain_generate(tiny_llama, PROMPTS, max_new_tokens=20)
    end = unended[1][4]
    expected = plain_generate(tiny_llama, PROMPTS, max_new_tokens=20, eos_token_id=end)
    assert expected[1][unended[1].index(end) + 1 :] == [0] * (19 - unended[1].index(end))
    engine = transformers_engine(tiny_llama)
    fed: list[list[int]] = []
    wrap_forward(engine, lambda arguments: fed.append(arguments["input_ids"][:, -1].tolist()))
    for number, prompt in enumerate(PROMPTS):
        engine.start(number, prompt, max_tokens=20, stop_token_ids=(end,))
    answers = engine.run()
    assert [answers[number].token_ids for number in NUMBERS] == [
        row[: row.index(end) + 1] if end in row else row for row in expected
    ]
    # Every token but the last goes in again; only the one that ends a row is padding here already.
    assert [list(row) for row in zip(*fed[1:], strict=True)] == [
        [0 if token_id == end else token_id for token_id in row[: len(fed) - 1]] for row in expected
    ]


RAGGED: list[dict[str, Any]] = [
    {"max_tokens": 12},
    {"max_tokens": 40, "stop_length": 1},
    {"max_tokens": 40, "stop_length": 25},
    {"max_tokens": 3},
    {"max_tokens": 40, "stop_length": 9},
]


def test_ragged_rows_get_the_tokens_and_the_ends_of_the_native_executor(tiny_llama: Path) -> None:
    engines = [native_engine(tiny_llama), transformers_engine(tiny_llama)]
    for engine in engines:
        for number, prompt in enumerate(PROMPTS):
            engine.start(number, prompt, **RAGGED[number])
    native, ours = (engine.run() for engine in engines)
    assert [len(ours[number].token_ids) for number in NUMBERS] == [12, 1, 25, 3, 9]
    assert [ours[number].finish_reason for number in NUMBERS] == ["length", "stop", "stop", "length", "stop"]
    for number in NUMBERS:
        assert ours[number].token_ids == native[number].token_ids
        assert ours[number].finish_reason == native[number].finish_reason
        # As in test_against_transformers: float32 sums in another order.
        torch.testing.assert_close(
            torch.stack(ours[number].logits), torch.stack(native[number].logits), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 123},
        {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 0.0, "min_tokens": 6, "logit_bias": {9: 100.0}, "bad_sequences": ((9,),)},
    ],
)
def test_sampling_fields_mean_what_they_mean_to_the_native_executor(tiny_llama: Path, sampling: dict[str, Any]) -> None:
    engines = [native_engine(tiny_llama), transformers_engine(tiny_llama)]
    for engine in engines:
        for number, prompt in enumerate(PROMPTS):
            engine.start(number, prompt, max_tokens=15, **sampling)
    native, ours = (engine.run() for engine in engines)
    assert [ours[number].token_ids for number in NUMBERS] == [native[number].token_ids for number in NUMBERS]


def test_logprobs_are_those_of_the_native_executor(tiny_llama: Path) -> None:
    engines = [native_engine(tiny_llama), transformers_engine(tiny_llama)]
    native, ours = (engine.start(0, PROMPTS[1], max_tokens=6, logprobs=3) for engine in engines)
    for engine in engines:
        engine.run()
    assert [scores.ids for scores in ours.logprobs] == [scores.ids for scores in native.logprobs]
    assert [scores.ids[0] for scores in ours.logprobs] == ours.output_ids
    for scores, expected in zip(ours.logprobs, native.logprobs, strict=True):
        assert scores.values == pytest.approx(expected.values, abs=1e-4)


def test_rows_that_ended_may_run_past_the_context(tmp_path: Path) -> None:
    """A full-length prompt with a short answer is computed on beside a short prompt with a full-length answer."""
    folder = save_tiny_model(tmp_path, LlamaConfig(**{**SHAPE, "max_position_embeddings": 64}))
    expected = plain_generate(folder, [[5, 6]], max_new_tokens=62)
    engine = transformers_engine(folder)
    engine.start(0, PROMPTS[1], max_tokens=4)
    engine.start(1, [5, 6], max_tokens=62)
    assert engine.run()[1].token_ids == expected[0]
    assert len(engine.answers[0].token_ids) == 4


def test_the_folders_own_generation_config_changes_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    expected = transformers_engine(tiny_llama).answer(PROMPTS[1], max_tokens=20).token_ids
    folder = shutil.copytree(tiny_llama, tmp_path / "model")
    declared = {"do_sample": True, "temperature": 5.0, "repetition_penalty": 9.0, "eos_token_id": expected[3]}
    (folder / "generation_config.json").write_text(json.dumps(declared))
    engine = transformers_engine(folder)
    assert engine.answer(PROMPTS[1], max_tokens=20).token_ids == expected
    answer = engine.answer(PROMPTS[1], max_tokens=20, ignore_eos=False)  # an end as for every executor
    assert (answer.token_ids, answer.finish_reason) == (expected[: expected.index(expected[3]) + 1], "stop")


# --- steps and groups


def test_a_step_is_one_forward_pass_and_is_recorded_like_a_native_one(tiny_llama: Path) -> None:
    engine, native = transformers_engine(tiny_llama, max_num_seqs=3), native_engine(tiny_llama, max_num_seqs=3)
    rows: list[int] = []
    wrap_forward(engine, lambda arguments: rows.append(arguments["input_ids"].numel()))
    for either in (engine, native):
        for number, prompt in enumerate(PROMPTS):
            either.start(number, prompt, **RAGGED[number])
        either.run()
    records = engine.engine.records.last(100)
    kinds = ("prefill_rows", "decode_rows", "prompt_padding_rows", "finished_rows")
    counted = (*kinds, "sampled_rows", "running", "waiting", "kv_blocks_used")
    assert [[record[name] for name in counted] for record in records] == [
        [record[name] for name in counted] for record in native.engine.records.last(100)
    ]
    assert rows == [sum(record[name] for name in kinds) for record in records]
    assert len(rows) == 25 + 9  # the longest answer of each group


def test_the_call_and_its_cache_are_gone_once_the_engine_is_idle(tiny_llama: Path) -> None:
    engine = transformers_engine(tiny_llama)
    caches: list[Any] = []
    wrap_forward(engine, lambda arguments: caches.append(cache_of(arguments)))
    engine.answer(PROMPTS[1])
    (thread,) = generate_threads() or [engine.runner._group.thread]
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert len(caches) == 8
    assert [cache() for cache in caches] == [None] * 8


def test_the_next_group_begins_when_the_call_of_the_one_before_has_ended(tiny_llama: Path) -> None:
    engine = transformers_engine(tiny_llama, max_num_seqs=2)
    calls: list[list[threading.Thread]] = []
    wrap_forward(engine, lambda _: calls.append(generate_threads()))
    for number, prompt in enumerate(PROMPTS):
        engine.start(number, prompt, max_tokens=4)
    engine.run()
    assert [len(threads) for threads in calls] == [1] * 12
    assert len({id(threads[0]) for threads in calls}) == 3
    assert all(not threads[0].daemon for threads in calls)


def test_a_cancelled_row_is_fed_padding_and_the_others_get_their_tokens(tiny_llama: Path) -> None:
    expected = plain_generate(tiny_llama, PROMPTS, max_new_tokens=10)
    engine = transformers_engine(tiny_llama)
    fed: list[list[int]] = []
    wrap_forward(engine, lambda arguments: fed.append(arguments["input_ids"][:, -1].tolist()))
    for number, prompt in enumerate(PROMPTS):
        engine.start(number, prompt, max_tokens=10)
    for _ in range(3):
        engine.step()
    (cancelled,) = engine.engine.abort([(b"", 2)])
    assert cancelled.output_ids == expected[2][:3]
    answers = engine.run()
    others = [number for number in NUMBERS if number != 2]
    assert [answers[number].token_ids for number in others] == [expected[number] for number in others]
    assert [row[2] for row in fed[1:]] == [*expected[2][:2], *[0] * 7]


def test_a_group_that_is_cancelled_as_a_whole_ends_without_another_step(tiny_llama: Path) -> None:
    engine = transformers_engine(tiny_llama)
    for number, prompt in enumerate(PROMPTS):
        engine.start(number, prompt, max_tokens=100)
    engine.step()
    engine.step()
    (thread,) = generate_threads()
    engine.engine.abort(list(engine.engine.requests))
    thread.join(timeout=30)
    assert not thread.is_alive()
    answer = engine.answer(PROMPTS[1], max_tokens=20)
    assert [answer.token_ids] == plain_generate(tiny_llama, [PROMPTS[1]], max_new_tokens=20)


# --- failures


@pytest.fixture
def no_log() -> Iterator[None]:
    """A logged traceback is kept by pytest, and keeps what the failed call had allocated."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError, "RuntimeError: the device is on fire"),
        (
            torch.OutOfMemoryError,
            "MemoryError: no memory for a group of 5 rows in generate(), which cannot be split "
            "(OutOfMemoryError: the device is on fire)",
        ),
    ],
)
@pytest.mark.parametrize("failing", [1, 4])
def test_a_forward_pass_that_fails_ends_its_group_alone(
    tiny_llama: Path, error: type[Exception], reason: str, failing: int, no_log: None
) -> None:
    engine = transformers_engine(tiny_llama, max_num_seqs=5)
    caches: list[Any] = []

    def fail_once(arguments: dict[str, Any]) -> None:
        caches.append(cache_of(arguments))
        if len(caches) == failing:
            raise error("the device is on fire")

    wrap_forward(engine, fail_once)
    requests: list[Request] = [engine.start(number, prompt, max_tokens=20) for number, prompt in enumerate(PROMPTS)]
    requests.append(engine.start(5, PROMPTS[1], max_tokens=20))
    engine.run()
    assert [request.error for request in requests[:5]] == [f"the step that computed it failed: {reason}"] * 5
    assert [request.num_output_tokens for request in requests[:5]] == [failing - 1] * 5
    assert engine.answers[5].token_ids == plain_generate(tiny_llama, [PROMPTS[1]], max_new_tokens=20)[0]
    assert len(caches) == failing + 20  # the failed one was not tried again in parts


def test_what_a_failed_call_had_allocated_goes_with_its_error(tiny_llama: Path, no_log: None) -> None:
    engine = transformers_engine(tiny_llama)
    caches: list[Any] = []

    def fail(arguments: dict[str, Any]) -> None:
        caches.append(cache_of(arguments))
        if len(caches) == 2:
            raise RuntimeError

    wrap_forward(engine, fail)
    engine.answer(PROMPTS[1])
    assert [cache() for cache in caches] == [None, None]


def test_an_interpreter_may_exit_in_the_middle_of_a_group(tiny_llama: Path) -> None:
    """The call's thread is no daemon, which could be torn out of torch; it ends when the main thread has."""
    code = (
        "import sys; from pathlib import Path; from tiny_model import TinyEngine\n"
        "engine = TinyEngine(Path(sys.argv[1]), policy='lockstep', executor='transformers')\n"
        "engine.start(0, [5, 6], max_tokens=100); engine.step()\n"
        "print(engine.runner._group.thread.is_alive())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tiny_llama)],
        capture_output=True, text=True, timeout=120, cwd=Path(__file__).parent, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (0, "True\n"), result.stderr


# --- loading


def make_runner(folder: Path, **fields: Any) -> GenerateRunner:
    return GenerateRunner(make_config(policy="lockstep", executor="transformers", **fields), folder)


@pytest.mark.parametrize(("weights", "num_blocks"), [("auto", 100), ("fp32", 100), ("bf16", 200)])
def test_the_pool_has_as_many_blocks_as_its_bytes_hold_in_the_weights_dtype(
    tiny_llama: Path, weights: str, num_blocks: int
) -> None:
    runner = make_runner(tiny_llama, weights=weights, kv_cache_bytes=100 * 16 * KV_VALUES_PER_TOKEN * 4 + 1)
    assert runner.num_blocks == num_blocks
    assert runner.model.dtype == (torch.bfloat16 if weights == "bf16" else torch.float32)
    assert (runner.max_model_len, runner.vocab_size, runner.eos_token_ids) == (256, 256, {2})
    assert runner.device_name == "cpu"
    assert not runner.batch_invariant


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_model_len": 257}, "max_model_len is 257; the model allows at most 256"),
        ({"kv_cache_bytes": 8191}, "kv_cache_bytes is 8191; one block of this model takes 8192"),
    ],
)
def test_what_the_model_cannot_do_is_refused_as_by_the_native_executor(
    tiny_llama: Path, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_runner(tiny_llama, **fields)
    assert str(refusal.value) == reason


def test_pickled_weights_are_not_read(tiny_llama: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_llama / "config.json", tmp_path)
    torch.save(load_reference(tiny_llama).state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        make_runner(tmp_path)


@pytest.mark.parametrize("threads", [1, 2])
def test_generate_computes_with_the_configured_threads(tiny_llama: Path, threads: int) -> None:
    engine = transformers_engine(tiny_llama, threads=threads)
    seen: list[int] = []
    wrap_forward(engine, lambda _: seen.append(torch.get_num_threads()))
    engine.answer(PROMPTS[1], max_tokens=2)
    assert seen == [threads] * 2


def test_there_are_no_blocks_to_copy(tiny_llama: Path) -> None:
    with pytest.raises(NotImplementedError, match=r"generate\(\) has no KV blocks to copy: \[\(1, 2\)\]"):
        make_runner(tiny_llama).copy_blocks([(1, 2)])
