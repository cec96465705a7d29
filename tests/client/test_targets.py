"""Targets over HTTP against a server scripted in time: every figure by hand, every failure by its name."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from loading import load
from scripted_http import Answer, Cut, Event, Pause, Raw, Script, ScriptedHttp, Silence, Step
from slipstream_client.comparison.request_figures import inter_chunk_ms, inter_token_ms, tpot_ms, ttft_ms
from slipstream_client.comparison.run_figures import run_figures
from slipstream_client.errors import SlipstreamError
from slipstream_client.load.arrivals import ClosedLoop
from slipstream_client.load.generator import LoadOptions, run_load
from slipstream_client.load.targets import make_target
from slipstream_client.load.targets.openai import OpenAiTarget
from slipstream_client.load.workload import make_workload

END = "[DONE]"
STREAMS = ["generate_stream", "openai"]


def config(*inputs: str, decoupled: bool = True, batch: int = 0, ours: bool = True, **more: Any) -> dict[str, Any]:
    parameters = {"policy": {"string_value": "continuous"}} if ours else {}
    return {
        "name": "m",
        "input": [{"name": name} for name in ("text_input", *inputs)],
        "max_batch_size": batch,
        "model_transaction_policy": {"decoupled": decoupled},
        "parameters": parameters,
    } | more


OURS = config("sampling_parameters", "stream", "return_num_output_tokens", "return_stats", "return_finish_reason")


@pytest.fixture(autouse=True)
def continuous(http: ScriptedHttp) -> None:
    """The model that most tests ask."""
    http.models["continuous"] = OURS


def chunk(target: str, text: str, tokens: int, total: int, *, last: bool = False) -> dict[str, Any]:
    """A chunk of `tokens` tokens, `total` with those before it, as each target's server says it."""
    if target == "openai":
        choice = {"index": 0, "text": text, "finish_reason": "length" if last else None}
        return {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": total}}
    said = {"text_output": text, "num_output_tokens": tokens, "num_input_tokens": 7}
    return said | {"finish_reason": "stop" if last else "", "stats": '{"queue_ms": 5.0}' if last else ""}


def answer(target: str, count: int) -> list[Step]:
    """A whole stream of single tokens."""
    chunks = [chunk(target, f" {at}", 1, at + 1, last=at == count - 1) for at in range(count)]
    return [*(Event(each) for each in chunks), *([Event(END)] if target == "openai" else [])]


@pytest.mark.parametrize("target", STREAMS)
def test_every_figure_of_a_stream_is_the_scripted_one(http: ScriptedHttp, target: str) -> None:
    """BEN-05: four tokens a chunk, and an empty one before and between them; what brings no token is no first one.

    Tokens come at 200 ms, 300 ms and 500 ms, and the last event, which is empty, at 600 ms.
    """
    http.script = lambda served: [
        Event({"choices": []} if target == "openai" else chunk(target, "", 0, 0)),
        Pause(0.2),
        Event(chunk(target, " a b c d", 4, 4)),
        Pause(0.1),
        Event(chunk(target, "", 0, 4), chunk(target, " e f g h", 4, 8)),
        Pause(0.2),
        Event(chunk(target, " i", 1, 9)),
        Pause(0.1),
        Event(chunk(target, "", 0, 9, last=True)),
        *([Event(END)] if target == "openai" else []),
    ]
    loaded = load(http, make_workload("fixed:3,9", 1), target=target)
    (record,) = loaded.records
    assert (record.error, record.input_tokens, record.output_tokens) == (None, 7, 9)
    assert [tokens for _, tokens in record.chunks] == [0, 4, 0, 4, 1, 0]
    assert ttft_ms(record) == pytest.approx(200, abs=loaded.tolerance_ms)
    assert inter_chunk_ms(record) == pytest.approx([100, 200], abs=loaded.tolerance_ms)
    assert inter_token_ms(record) == pytest.approx([25, 25, 25, 25, 200], abs=loaded.tolerance_ms)
    assert tpot_ms(record) == pytest.approx(300 / 8, abs=loaded.tolerance_ms / 8)
    assert record.e2e_ms == pytest.approx(600, abs=loaded.tolerance_ms)
    # And against what the server noted when it wrote: never before it, and not much later.
    (served,) = http.served
    written = [at - loaded.report.start_s for at in served.said]
    read = [record.chunks[place][0] for place in (0, 1, 3, 4, 5)]
    assert record.sent <= served.arrived - loaded.report.start_s
    assert all(0 <= later - at < loaded.tolerance_ms / 1000 for at, later in zip(written, read, strict=False))


def test_stats_and_lengths_are_those_of_our_doors(http: ScriptedHttp) -> None:
    http.script = lambda served: answer("generate_stream", 4)
    workload = make_workload("fixed:3,4", 1)
    (record,) = load(http, workload, target="generate_stream").records
    assert (record.finish_reason, record.stats) == ("stop", {"queue_ms": 5.0})
    (served,) = http.served
    assert served.path == "/v2/models/continuous/generate_stream"
    assert (served.body["text_input"], served.body["stream"]) == (workload.requests[0].text, True)
    assert served.sampling.pop("cache_salt")
    assert served.sampling.items() >= workload.requests[0].sampling().items()


def test_an_openai_request_has_its_length_as_its_limit(http: ScriptedHttp) -> None:
    http.script = lambda served: answer("openai", 4)
    (record,) = load(http, make_workload("fixed:3,4", 1), target="openai").records
    assert (record.finish_reason, record.stats) == ("length", {"token_counts": "usage of each chunk"})
    (served,) = http.served
    assert served.path == "/v1/completions"
    assert (served.body["max_tokens"], served.body["ignore_eos"], served.body["model"]) == (4, True, "continuous")
    assert served.body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize(("keeps", "connections"), [(True, 1), (False, 3)])
def test_a_server_that_closes_connections_without_saying_so_gets_each_request_on_a_new_one(
    http: ScriptedHttp, keeps: bool, connections: int
) -> None:
    http.script = lambda served: answer("openai", 4)

    async def send_all() -> None:
        async with OpenAiTarget(http.url, "continuous", keeps_connections=keeps) as target:
            requests = make_workload("fixed:3,4", 3).requests
            await run_load(target, requests, LoadOptions("run", ClosedLoop(1)), [])

    asyncio.run(send_all())
    assert len({served.connection for served in http.served}) == connections


@pytest.mark.parametrize(
    ("usage", "tokens", "said"),
    [({"completion_tokens": 6}, [2, 2, 2, 0], "usage of the whole"), (None, [1, 1, 1, 0], "chunks with text")],
)
def test_without_usage_in_each_chunk_the_record_says_what_was_counted(
    http: ScriptedHttp, usage: dict[str, int] | None, tokens: list[int], said: str
) -> None:
    texts = [Event({"choices": [{"text": text}], "usage": None}) for text in (" a", " b", " c")]
    http.script = lambda served: [*texts, Event({"choices": [], "usage": usage}), Event(END)]
    (record,) = load(http, make_workload(f"fixed:3,{sum(tokens)}", 1), target="openai").records
    assert (record.error, record.stats) == (None, {"token_counts": said})
    assert [count for _, count in record.chunks] == tokens


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("style", ["deltas", "deltas, then all of it", "all so far"])
def test_a_text_that_is_repeated_is_counted_once(http: ScriptedHttp, style: str, counts: bool) -> None:
    """BEN-08: other people's models give deltas, or repeat the text in the last response or in every one."""
    http.models["other"] = config("max_tokens", "stream", ours=False)
    texts = {
        "deltas": [" a", " b", " c", ""],
        "deltas, then all of it": [" a", " b", " c", " a b c"],
        "all so far": [" a", " a b", " a b c", " a b c"],
    }[style]
    totals = {"deltas": [1, 1, 1, 0], "deltas, then all of it": [1, 1, 1, 3], "all so far": [1, 2, 3, 3]}[style]
    said = [
        {"text_output": text} | ({"num_output_tokens": total} if counts else {})
        for text, total in zip(texts, totals, strict=True)
    ]
    http.script = lambda served: [Event(each) for each in said]
    (record,) = load(http, make_workload("fixed:3,3", 1), target="generate_stream", model="other").records
    assert (record.error, record.output_tokens) == (None, 3)
    assert [tokens for _, tokens in record.chunks] == [1, 1, 1, 0]
    assert http.served[0].body == {"text_input": http.served[0].text, "max_tokens": 3, "stream": True}


def test_another_models_sampling_parameters_are_those_of_vllm(http: ScriptedHttp) -> None:
    http.models["other"] = config("sampling_parameters", "stream", "return_num_output_tokens", ours=False)
    http.script = lambda served: answer("generate_stream", 3)
    (record,) = load(http, make_workload("fixed:3,3", 1), target="generate_stream", model="other").records
    assert record.error is None
    assert http.served[0].sampling == {"temperature": 0, "max_tokens": 3, "ignore_eos": True}


@pytest.mark.parametrize("target", STREAMS)
def test_half_of_the_answers_are_empty(http: ScriptedHttp, target: str) -> None:
    """BEN-02: status 200 and no token; those are failures, and no first token is counted for them."""
    empty = [Pause(0.1), *([Event(END)] if target == "openai" else [Event(chunk(target, "", 0, 0, last=True))])]
    workload = make_workload("fixed:3,2", 4)
    empties = {workload.requests[at].text for at in (1, 3)}
    http.script = lambda served: empty if served.text in empties else [Pause(0.3), *answer(target, 2)]
    loaded = load(http, workload, ClosedLoop(4), target=target)
    assert [record.error_code for record in loaded.records] == [None, "EMPTY", None, "EMPTY"]
    assert [record.first is None for record in loaded.records] == [False, True, False, True]
    assert run_figures(loaded.records)["ttft_ms"]["p50"] == pytest.approx(300, abs=loaded.tolerance_ms)


REFUSALS = [
    ("openai", Answer({"error": {"message": "overloaded", "code": 503}}, 503)),
    ("openai", Answer({"error": {"message": "overloaded"}}, 429)),
    ("generate_stream", Answer({"error": "overloaded"}, 503)),
    ("generate_stream", Answer({"error": "UNAVAILABLE: overloaded"}, 400)),
]


@pytest.mark.parametrize(("target", "refusal"), REFUSALS)
def test_nothing_is_sent_again_unless_asked(http: ScriptedHttp, target: str, refusal: Answer) -> None:
    """BEN-06: a refusal is one request at the server and one failure in the records."""
    http.script = lambda served: [refusal]
    (record,) = load(http, make_workload("fixed:3,2", 1), target=target).records
    assert record.error_code == "UNAVAILABLE"
    assert "overloaded" in record.error
    assert (record.retries, len(http.served)) == (0, 1)


@pytest.mark.parametrize(("target", "refusal"), REFUSALS)
def test_retries_are_counted_and_latency_includes_all_attempts(
    http: ScriptedHttp, target: str, refusal: Answer
) -> None:
    """BEN-06: two refusals of 100 ms with pauses of 100 ms and 200 ms, and an answer after 100 ms: 600 ms."""
    http.script = lambda served: [Pause(0.1), *([refusal] if served.attempt < 2 else answer(target, 2))]
    loaded = load(http, make_workload("fixed:3,2", 1), target=target, retries=3, first_pause_s=0.1)
    (record,) = loaded.records
    assert (record.error, record.retries, len(http.served)) == (None, 2, 3)
    assert ttft_ms(record) == pytest.approx(600, abs=3 * loaded.tolerance_ms)
    assert record.e2e_ms >= 600


@pytest.mark.parametrize("target", STREAMS)
def test_a_length_that_got_lost_on_the_way_is_a_failure(http: ScriptedHttp, target: str) -> None:
    """BEN-10: a gateway that drops `ignore_eos` ends answers where the model does."""
    http.script = lambda served: answer(target, 3)
    (record,) = load(http, make_workload("fixed:3,5", 1), target=target).records
    assert (record.error_code, record.output_tokens) == ("WRONG_LENGTH", 3)


def failing(target: str) -> dict[str, list[Step]]:
    first = Event(chunk(target, " a", 1, 1))
    error: dict[str, Any] = {"error": "engine died"}
    if target == "openai":
        error = {"error": {"message": "engine died", "code": 500}}
    return {
        "error": [first, Event(error)],
        "cut": [first, Cut()],
        "closed early": [first],
        "half open": [first, Silence()],
        "no json": [first, Event("<html>")],
        "an event in two writes, then cut": [Raw(b'data: {"text_'), Cut()],
    }


@pytest.mark.parametrize("target", STREAMS)
@pytest.mark.parametrize(
    ("what", "codes", "tokens"),
    [
        ("error", {"INTERNAL", "UNKNOWN"}, 1),
        ("cut", {"UNAVAILABLE"}, 1),
        ("closed early", {"UNAVAILABLE"}, 1),
        ("half open", {"DEADLINE_EXCEEDED"}, 1),
        ("no json", {"INTERNAL"}, 1),
        ("an event in two writes, then cut", {"UNAVAILABLE"}, 0),
    ],
)
def test_what_fails_after_status_200_is_a_failure_with_its_code(
    http: ScriptedHttp, target: str, what: str, codes: set[str], tokens: int
) -> None:
    workload = make_workload("fixed:3,2", 2)
    bad = workload.requests[0].text
    http.script = lambda served: failing(target)[what] if served.text == bad else answer(target, 2)
    records = load(http, workload, target=target, timeout_s=0.5).records
    assert records[0].error_code in codes
    assert records[0].output_tokens == tokens
    assert (records[1].error, records[1].output_tokens) == (None, 2)
    if what == "error":
        assert records[0].error == "engine died"
    if what == "half open":
        assert 500 <= records[0].e2e_ms < 1500


def test_events_are_found_however_they_are_cut_up(http: ScriptedHttp) -> None:
    """With line ends of two bytes, comments, fields other than data, and a last event without an empty line."""
    whole = json.dumps(chunk("generate_stream", " a", 1, 1)).encode()
    last = json.dumps(chunk("generate_stream", " b", 1, 2, last=True)).encode()
    http.script = lambda served: [
        Raw(b": hello\r\n\r\nevent: x\r\ndata:" + whole[:9]),
        Pause(0.1),
        Raw(whole[9:] + b"\r"),
        Pause(0.1),
        Raw(b"\n\r\ndata: " + last),
    ]
    (record,) = load(http, make_workload("fixed:3,2", 1), target="generate_stream").records
    assert (record.error, [tokens for _, tokens in record.chunks]) == (None, [1, 1])


@pytest.mark.parametrize("target", STREAMS)
def test_connections_are_kept_and_as_many_as_there_are_requests(http: ScriptedHttp, target: str) -> None:
    script: Script = lambda served: [Pause(0.1), *answer(target, 2)]  # noqa: E731
    http.script = script
    load(http, make_workload("fixed:3,2", 5), target=target)
    assert len({served.connection for served in http.served}) == 1
    http.served.clear()
    loaded = load(http, make_workload("fixed:3,2", 120), ClosedLoop(120), target=target)
    assert len({served.connection for served in http.served}) == 120
    assert all(record.error is None for record in loaded.records)


@pytest.mark.parametrize("target", STREAMS)
def test_cancelling_closes_the_connection(http: ScriptedHttp, target: str) -> None:
    http.script = lambda served: [Event(chunk(target, " a", 1, 1)), Silence()]

    async def send() -> None:
        async with make_target(target, http.url, "continuous") as entered:
            requests = make_workload("fixed:3,2", 1).requests
            task = asyncio.create_task(run_load(entered, requests, LoadOptions("run", ClosedLoop(1)), []))
            while not http.served:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(http.client_left.wait, 5)

    asyncio.run(send())


def test_infer_carries_a_row_or_a_batch(http: ScriptedHttp) -> None:
    http.models["static"] = config("sampling_parameters", decoupled=False, batch=4)
    http.models["unary"] = config("sampling_parameters", "return_stats", decoupled=False)

    def rows(count: int) -> dict[str, Any]:
        columns = {"text_output": " a b", "num_output_tokens": 2, "num_input_tokens": 3, "finish_reason": "stop"}
        return {"outputs": [{"name": name, "data": [value] * count} for name, value in columns.items()]}

    http.script = lambda served: [Pause(0.2), Answer(rows(len(served.body["inputs"][0]["data"])))]
    workload = make_workload("fixed:3,2", 6)
    loaded = load(http, workload, ClosedLoop(4), target="infer", model="static")
    assert [record.error for record in loaded.records] == [None] * 6
    assert [record.e2e_ms for record in loaded.records] == pytest.approx([200] * 6, abs=loaded.tolerance_ms)
    assert [record.first for record in loaded.records] == [None] * 6
    tensors = {tensor["name"]: tensor for tensor in http.served[0].body["inputs"]}
    assert (tensors["text_input"]["shape"], tensors["text_input"]["datatype"]) == ([4, 1], "BYTES")
    sent = [tensor["data"] for served in http.served for tensor in served.body["inputs"][1:]]
    assert sorted(text for texts in sent for text in texts) == sorted(request.text for request in workload.requests)
    http.served.clear()
    (record,) = load(http, make_workload("fixed:3,2", 1), target="infer", model="unary").records
    assert (record.output_tokens, record.input_tokens, record.finish_reason) == (2, 3, "stop")
    tensors = {tensor["name"]: tensor for tensor in http.served[0].body["inputs"]}
    assert tensors["return_stats"] == {"name": "return_stats", "shape": [1], "datatype": "BOOL", "data": [True]}


@pytest.mark.parametrize(
    ("target", "model", "reason"),
    [
        ("generate_stream", "none", "unknown model: 'none'"),
        ("generate_stream", "static", "takes batches, which generate_stream cannot carry"),
        ("infer", "continuous", "streams, which infer cannot carry"),
        ("infer", "image", "has no input text_input"),
        ("soap", "continuous", "no target 'soap'; there are grpc, generate_stream, infer, openai"),
    ],
)
def test_a_model_that_cannot_be_asked_so_is_refused_at_once(
    http: ScriptedHttp, target: str, model: str, reason: str
) -> None:
    http.models["static"] = config("sampling_parameters", decoupled=False, batch=4)
    http.models["image"] = config(decoupled=False) | {"input": [{"name": "pixels"}]}
    with pytest.raises(SlipstreamError, match=reason):
        load(http, make_workload("fixed:3,2", 1), target=target, model=model)


@pytest.mark.parametrize("target", ["grpc", "generate_stream", "infer", "openai"])
def test_a_server_that_is_not_there_is_said_so_at_once(http: ScriptedHttp, target: str) -> None:
    http.url = "127.0.0.1:1"
    with pytest.raises(SlipstreamError, match="no server answers at"):
        load(http, make_workload("fixed:3,2", 1), target=target)
