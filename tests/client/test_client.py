"""The public clients, sync and asyncio, against a server that misbehaves by script."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import grpc
import numpy as np
import pytest
from tritonclient.utils import deserialize_bytes_tensor

from fake_triton import Fail, FakeTriton, Say, Wait, answer
from slipstream_client.aio import AsyncSlipstreamClient
from slipstream_client.client import SlipstreamClient
from slipstream_client.server.ports import free_ports
from slipstream_client.tensors import RequestFailed


def test_stream_gives_deltas_token_counts_and_one_final_chunk(triton: FakeTriton) -> None:
    triton.script = lambda received: [Say([]), *answer([5, 6, 7], per_chunk=2)]
    with SlipstreamClient(triton.url) as client:
        chunks = list(client.stream("hello", max_tokens=3, temperature=0.0))
    assert [chunk.num_tokens for chunk in chunks] == [0, 2, 1]
    assert [chunk.final for chunk in chunks] == [False, False, True]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, "stop"]
    assert "".join(chunk.text for chunk in chunks) == " 5 6 7"
    assert chunks[-1].stats == {"inference_ms": 1.0, "output_ids": [5, 6, 7]}
    assert chunks[0].stats is None


@pytest.mark.parametrize("model", ["continuous", "continuous_unary"])
def test_an_answer_may_be_larger_than_grpcs_own_limit(triton: FakeTriton, model: str) -> None:
    """Log-probabilities of a few thousand tokens are more than 4 MiB."""
    text = "x" * (5 << 20)
    triton.script = lambda received: [Say([1], text=text, final=True)]

    async def ask() -> str:
        async with AsyncSlipstreamClient(triton.url, model) as client:
            return (await client.generate("a")).text

    with SlipstreamClient(triton.url, model) as client:
        assert client.generate("a").text == text
    assert asyncio.run(ask()) == text


def test_request_carries_the_vllm_style_tensors(triton: FakeTriton) -> None:
    triton.script = lambda received: answer([1])
    with SlipstreamClient(triton.url) as client:
        list(client.stream("grüß", max_tokens=3, top_k=0))
        client.generate(input_ids=[1, 2, 70000])
    streamed, whole = triton.received
    assert streamed.texts == ["grüß"]
    assert streamed.sampling == [{"max_tokens": 3, "top_k": 0}]
    assert streamed.inputs["stream"] == ([1], b"\x01")
    assert streamed.inputs["return_stats"] == ([1], b"\x01")
    assert "stream" not in whole.inputs
    assert "text_input" not in whole.inputs
    shape, content = whole.inputs["input_ids"]
    assert (shape, np.frombuffer(content, dtype="<i4").tolist()) == ([3], [1, 2, 70000])


@pytest.mark.parametrize("model", ["dynamic", "static", "iterative"])
def test_siblings_get_exactly_two_inputs_of_one_row(triton: FakeTriton, model: str) -> None:
    triton.script = lambda received: answer([1, 2])
    with SlipstreamClient(triton.url, model) as client:
        generation = client.generate("hello", max_tokens=2)
        with pytest.raises(RequestFailed, match="takes text alone"):
            client.generate(input_ids=[1])
    (received,) = triton.received
    assert {name: shape for name, (shape, _) in received.inputs.items()} == {
        "text_input": [1, 1],
        "sampling_parameters": [1, 1],
    }
    assert (generation.text, generation.num_output_tokens, generation.finish_reason) == (" 1 2", 2, "stop")
    assert generation.output_ids == [1, 2]


@pytest.mark.parametrize("model", ["continuous", "continuous_unary", "dynamic", "iterative"])
def test_generate_joins_the_whole_answer(triton: FakeTriton, model: str) -> None:
    with SlipstreamClient(triton.url, model) as client:
        generation = client.generate("abc", stop_length=4, request_id="one")
    assert (generation.text, generation.num_output_tokens) == (" 3 4 5 6", 4)
    assert generation.num_input_tokens == 7
    assert triton.received[0].id == "one"


def test_concurrent_requests_share_one_stream_and_are_told_apart(triton: FakeTriton) -> None:
    triton.script = lambda received: answer([int(received.text)] * 5, gap_s=0.01)
    with SlipstreamClient(triton.url) as client, ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda n: "".join(c.text for c in client.stream(str(n))), range(8)))
    assert texts == [f" {n}" * 5 for n in range(8)]
    assert triton.num_streams == 1
    assert triton.most_in_flight > 1


def test_an_error_of_one_request_leaves_the_others_alone(triton: FakeTriton) -> None:
    go_on = threading.Event()
    scripts = {
        "good": [Say([1]), Wait(event=go_on), Say([2], final=True)],
        "bad": [Say([1]), Fail("queue is full")],
    }
    triton.script = lambda received: scripts[received.text]
    with SlipstreamClient(triton.url) as client:
        good = client.stream("good")
        assert next(good).num_tokens == 1
        bad = client.stream("bad")
        assert next(bad).num_tokens == 1
        with pytest.raises(RequestFailed, match="queue is full"):
            next(bad)
        assert list(bad) == []
        go_on.set()
        assert [chunk.num_tokens for chunk in good] == [1]
    assert triton.num_streams == 1


@pytest.mark.parametrize("model", ["continuous", "iterative"])
def test_closing_an_iterator_cancels_its_request_at_the_server(triton: FakeTriton, model: str) -> None:
    triton.script = lambda received: [Say([1]), Wait(30.0), Say([2], final=True)]
    with SlipstreamClient(triton.url, model) as client:
        stream = client.stream("hello", request_id="mine")
        next(stream)
        stream.close()
        assert triton.cancel_seen.wait(5)
        assert list(stream) == []
    assert triton.cancelled == ["mine"]


@pytest.mark.parametrize("model", ["continuous", "iterative", "dynamic"])
def test_a_request_that_takes_too_long_fails_and_is_cancelled(triton: FakeTriton, model: str) -> None:
    """As one does whose model's process was killed: Triton never ends its stream."""
    triton.script = lambda received: [Say([1]), Wait(3.0 if model == "dynamic" else 30.0), Say([2], final=True)]
    with SlipstreamClient(triton.url, model, timeout_s=0.4) as client:
        with pytest.raises(RequestFailed, match=r"not answered within 0\.4 s") as error:
            list(client.stream("hello"))
        assert error.value.code == "DEADLINE_EXCEEDED"
        assert model == "dynamic" or triton.cancel_seen.wait(5)  # this server does not look at a plain call again


def test_a_dropped_iterator_cancels_its_request_too(triton: FakeTriton) -> None:
    triton.script = lambda received: [Say([1]), Wait(30.0), Say([2], final=True)]
    with SlipstreamClient(triton.url) as client:
        for _ in client.stream("hello", request_id="mine"):
            break
        gc.collect()
        assert triton.cancel_seen.wait(5)
    assert triton.cancelled == ["mine"]


def test_cancel_by_id_ends_that_request_alone(triton: FakeTriton) -> None:
    go_on = threading.Event()
    triton.script = lambda received: [Say([1]), Wait(event=go_on), Say([2], final=True)]
    with SlipstreamClient(triton.url) as client:
        kept, dropped = client.stream("kept", request_id="kept"), client.stream("dropped", request_id="dropped")
        next(kept), next(dropped)
        client.cancel("dropped")
        with pytest.raises(RequestFailed, match="cancelled"):
            next(dropped)
        go_on.set()
        assert [chunk.num_tokens for chunk in kept] == [1]
    assert triton.cancelled == ["dropped"]


def test_cancel_by_id_needs_the_input_for_it(triton: FakeTriton) -> None:
    with SlipstreamClient(triton.url, "dynamic") as client, pytest.raises(RequestFailed, match="cannot cancel by id"):
        client.cancel("x")


def test_an_id_that_still_runs_is_refused(triton: FakeTriton) -> None:
    triton.script = lambda received: [Say([1]), Wait(30.0)]
    with SlipstreamClient(triton.url) as client:
        first = client.stream("hello", request_id="same")
        next(first)
        with pytest.raises(RequestFailed, match="still running") as caught:
            client.stream("hello", request_id="same")
        assert caught.value.code == "ALREADY_EXISTS"


def test_a_broken_stream_fails_what_runs_and_the_next_request_opens_another(triton: FakeTriton) -> None:
    port = triton.url
    triton.script = lambda received: [Say([1]), Wait(30.0)]
    client = SlipstreamClient(port)
    stream = client.stream("hello")
    next(stream)
    triton._server.stop(grace=None).wait()
    with pytest.raises(RequestFailed) as caught:
        next(stream)
    assert caught.value.code in ("UNAVAILABLE", "CANCELLED")
    with pytest.raises(RequestFailed) as again:
        client.generate("hello")
    assert again.value.code == "UNAVAILABLE"
    client.close()


@pytest.mark.parametrize("model", ["continuous", "iterative", "dynamic"])
def test_the_servers_status_code_arrives(triton: FakeTriton, model: str) -> None:
    triton.script = lambda received: [Fail("engine is down\nTraceback", grpc.StatusCode.UNAVAILABLE)]
    with SlipstreamClient(triton.url, model) as client, pytest.raises(RequestFailed) as caught:
        client.generate("hello")
    assert (caught.value.code, str(caught.value)) == ("UNAVAILABLE", "engine is down (UNAVAILABLE)")
    assert caught.value.text == "engine is down\nTraceback"


def test_no_server_is_said_in_one_line() -> None:
    (port,) = free_ports(1)
    with SlipstreamClient(f"127.0.0.1:{port}") as client, pytest.raises(RequestFailed) as caught:
        client.generate("hello")
    assert str(caught.value) == f"no server answers at 127.0.0.1:{port} (UNAVAILABLE)"


def test_an_unknown_model_is_named(triton: FakeTriton) -> None:
    with SlipstreamClient(triton.url, "nope") as client, pytest.raises(RequestFailed, match="'nope'") as caught:
        client.generate("hello")
    assert caught.value.code == "NOT_FOUND"


@pytest.mark.parametrize("arguments", [{}, {"prompt": "a", "input_ids": [1]}, {"prompt": "a", "messages": []}])
def test_exactly_one_prompt_is_needed(triton: FakeTriton, arguments: dict) -> None:
    with SlipstreamClient(triton.url) as client, pytest.raises(RequestFailed, match="exactly one") as caught:
        client.generate(**arguments)
    assert caught.value.code == "INVALID_ARGUMENT"


@pytest.mark.parametrize("ids", [[1.5], [2**31], [[1], [2]], ["a"]])
def test_ids_that_are_no_int32_are_refused_here(triton: FakeTriton, ids: list) -> None:
    with SlipstreamClient(triton.url) as client, pytest.raises(RequestFailed, match="input_ids"):
        client.generate(input_ids=ids)
    assert triton.received == []


def test_asyncio_streams_and_generates(triton: FakeTriton) -> None:
    async def run() -> tuple[list[int], str]:
        async with AsyncSlipstreamClient(triton.url) as client:
            counts = [chunk.num_tokens async for chunk in client.stream("abc", stop_length=3)]
            return counts, (await client.generate("abc", stop_length=2)).text

    assert asyncio.run(run()) == ([1, 1, 1], " 3 4")


def test_asyncio_batch_keeps_the_order_of_its_rows(triton: FakeTriton) -> None:
    async def run() -> list[list[int] | None]:
        async with AsyncSlipstreamClient(triton.url, "static") as client:
            samplings = [{"stop_length": 2}, {"stop_length": 3}]
            return [row.output_ids for row in await client.generate_batch(["a", "bcd"], samplings)]

    assert asyncio.run(run()) == [[1, 2], [3, 4, 5]]
    (received,) = triton.received
    assert received.inputs["text_input"][0] == [2, 1]
    assert json.loads(json.dumps(received.sampling)) == [{"stop_length": 2}, {"stop_length": 3}]


def test_cancelling_a_task_cancels_exactly_its_request(triton: FakeTriton) -> None:
    go_on = threading.Event()
    triton.script = lambda received: [Say([1]), Wait(event=go_on), Say([2], final=True)]

    async def run() -> str:
        async with AsyncSlipstreamClient(triton.url) as client:
            kept = asyncio.create_task(client.generate("kept", request_id="kept"))
            dropped = asyncio.create_task(client.generate("dropped", request_id="dropped"))
            while len(triton.received) < 2:
                await asyncio.sleep(0.01)
            dropped.cancel()
            with pytest.raises(asyncio.CancelledError):
                await dropped
            await asyncio.to_thread(triton.cancel_seen.wait, 5)
            go_on.set()
            return (await kept).text

    assert asyncio.run(run()) == " 1 2"
    assert triton.cancelled == ["dropped"]


def test_leaving_an_async_iterator_cancels_its_request(triton: FakeTriton) -> None:
    triton.script = lambda received: [Say([1]), Wait(30.0)]

    async def run() -> None:
        async with AsyncSlipstreamClient(triton.url) as client:
            async with aclosing(client.stream("hello", request_id="mine")) as chunks:
                async for _ in chunks:
                    break
            await asyncio.to_thread(triton.cancel_seen.wait, 5)

    asyncio.run(run())
    assert triton.cancelled == ["mine"]


@pytest.mark.parametrize("model", ["continuous", "dynamic"])
@pytest.mark.parametrize("code", [grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE])
def test_a_request_that_the_server_ends_is_a_failure_not_a_cancelled_task(
    triton: FakeTriton, model: str, code: grpc.StatusCode
) -> None:
    triton.script = lambda received: [Fail("ended by the server", code)]

    async def run() -> None:
        async with AsyncSlipstreamClient(triton.url, model) as client:
            await client.generate("hello")

    with pytest.raises(RequestFailed, match="ended by the server") as caught:
        asyncio.run(run())
    assert caught.value.code == code.name


def test_a_stall_ends_at_the_timeout(triton: FakeTriton) -> None:
    triton.script = lambda received: [Say([1]), Wait(30.0)]

    async def run() -> None:
        async with AsyncSlipstreamClient(triton.url, timeout_s=0.2) as client:
            await client.generate("hello")

    with pytest.raises(RequestFailed) as caught:
        asyncio.run(run())
    assert caught.value.code == "DEADLINE_EXCEEDED"


def test_a_stream_that_ends_without_a_last_response_is_a_failure(triton: FakeTriton) -> None:
    triton.script = lambda received: [Say([1])]

    async def run() -> None:
        async with AsyncSlipstreamClient(triton.url) as client:
            await client.generate("hello")

    with pytest.raises(RequestFailed, match="before the last response"):
        asyncio.run(run())


def test_no_text_makes_a_tensor_that_is_not_what_its_shape_says(triton: FakeTriton) -> None:
    """VAL-05: a length before each element, as many elements as the shape has; also where a caller miscounts rows."""
    with SlipstreamClient(triton.url) as client, SlipstreamClient(triton.url, "static") as batching:
        single, batch = client.contract, batching.contract
    texts = ["", "\0", "é" * 300, "\U0001f600", "\x01\x00\x00\x00a"]
    requests = [single.request("1", text, None, {"stop": text}, stream=True) for text in texts]
    requests += [batch.batch_request("2", texts, [{}] * count) for count in (0, 1, len(texts))]
    for request in requests:
        for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True):
            if tensor.datatype == "BYTES":
                assert math.prod(tensor.shape) == len(deserialize_bytes_tensor(content))
    sent = [deserialize_bytes_tensor(request.raw_input_contents[0]).tolist() for request in requests]
    assert sent == [*([text.encode()] for text in texts), *[[text.encode() for text in texts]] * 3]
