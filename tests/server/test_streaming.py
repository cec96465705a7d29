"""What the models answer, over every way in: gRPC streams, HTTP generate and generate_stream, plain inference."""

from __future__ import annotations

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from helpers import (
    ENDED_PROMPT,
    PROMPTS,
    STREAMING,
    Answer,
    GrpcStream,
    Refused,
    ask,
    ask_batch,
    generate,
    generate_body,
    generate_stream,
    inputs_for,
    numpy_tensor,
    post,
    sampling_json,
    text_tensor,
)
from slipstream_client.client import SlipstreamClient
from slipstream_client.server.tritonserver import TritonServer
from slipstream_client.tensors import Chunk, RequestFailed, SamplingOptions

pytestmark = pytest.mark.server

PROMPT = PROMPTS[1]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def whole(shared_server: TritonServer) -> Answer:
    """The answer to PROMPT in one response."""
    status, answer = generate(shared_server, "continuous", generate_body("continuous", PROMPT, max_tokens=NUM_TOKENS))
    assert status == 200
    return Answer.of([{name: [value] for name, value in answer.items()}])


@pytest.mark.parametrize("model", STREAMING)
@pytest.mark.parametrize("empty_final", [False, True], ids=["as-usual", "with-enable_empty_final_response"])
def test_streamed_deltas_join_to_the_whole_answer_and_the_last_carries_the_final_flag(
    server: TritonServer, whole: Answer, model: str, empty_final: bool
) -> None:
    with GrpcStream(server) as stream:
        responses = stream.send(model, PROMPT, max_tokens=NUM_TOKENS, empty_final=empty_final).collect()
        # A second request on the stream shows that nothing else came for the first.
        second = stream.send(model, PROMPT, max_tokens=1, request_id="second").collect()
        assert [response.request_id for response in second] == ["second"]
    assert [response.final for response in responses] == [False] * (len(responses) - 1) + [True]
    assert [response.finish_reason for response in responses] == [""] * (len(responses) - 1) + ["length"]
    assert len(responses) >= NUM_TOKENS // 2, "it streams"
    answer = Answer.of([response.outputs for response in responses])
    assert answer.text == whole.text
    assert answer.ids == whole.ids
    assert answer.num_output_tokens == NUM_TOKENS
    assert {response.outputs["num_input_tokens"][0] for response in responses} == {whole.num_input_tokens}
    assert [response.outputs["stats"][0] for response in responses[:-1]] == [""] * (len(responses) - 1)


@pytest.mark.parametrize("model", ["continuous", "continuous_unary", "static", "dynamic", "iterative"])
def test_finish_reason_says_why_the_answer_ended(
    server: TritonServer, golden: dict[str, list[int]], model: str
) -> None:
    ids = golden[PROMPT]
    by_length = ask(server, model, PROMPT, max_tokens=3)
    assert (by_length.finish_reason, by_length.ids) == ("length", ids[:3])
    by_stop_length = ask(server, model, PROMPT, max_tokens=8, stop_length=4, ignore_eos=True)
    assert (by_stop_length.finish_reason, by_stop_length.ids) == ("stop", ids[:4])
    end = ids.index(ids[5]) + 1
    by_stop_token = ask(server, model, PROMPT, max_tokens=8, stop_token_ids=[ids[5]])
    assert (by_stop_token.finish_reason, by_stop_token.ids) == ("stop", ids[:end])


@pytest.mark.parametrize("model", ["continuous", "static", "dynamic", "iterative"])
def test_the_end_of_sequence_token_ends_an_answer_and_is_no_text(server: TritonServer, model: str) -> None:
    answer = ask(server, model, ENDED_PROMPT, max_tokens=8)
    assert (answer.finish_reason, answer.text, answer.num_output_tokens) == ("stop", "", 1)
    ignored = ask(server, model, ENDED_PROMPT, max_tokens=8, ignore_eos=True)
    assert (ignored.finish_reason, ignored.ids[0], ignored.num_output_tokens) == ("length", answer.ids[0], 8)


def test_without_stream_there_is_exactly_one_response(server: TritonServer, whole: Answer) -> None:
    """TRI-03: text and end in one, which is what makes HTTP generate work (fixture `whole`)."""
    with GrpcStream(server) as stream:
        responses = stream.send("continuous", PROMPT, stream=False, max_tokens=NUM_TOKENS).collect()
    assert [(response.text, response.final) for response in responses] == [(whole.text, True)]
    assert responses[0].outputs["num_output_tokens"] == [NUM_TOKENS]


def test_only_the_text_comes_where_nothing_else_is_asked_for(server: TritonServer, whole: Answer) -> None:
    sampling = '{"max_tokens": 12, "temperature": 0}'
    for model in ("continuous", "continuous_unary"):
        status, answer = generate(server, model, {"text_input": PROMPT, "sampling_parameters": sampling})
        assert status == 200
        assert answer == {"model_name": model, "model_version": "1", "text_output": whole.text}


@pytest.mark.parametrize("model", STREAMING)
def test_generate_stream_sends_one_event_a_chunk(server: TritonServer, whole: Answer, model: str) -> None:
    body = generate_body(model, PROMPT, stream=True, max_tokens=NUM_TOKENS)
    status, events = generate_stream(server, model, body)
    assert status == 200
    assert "".join(event["text_output"] for event in events) == whole.text
    assert sum(event["num_output_tokens"] for event in events) == NUM_TOKENS
    assert [event["finish_reason"] for event in events] == [""] * (len(events) - 1) + ["length"]
    assert len(events) >= NUM_TOKENS // 2


def test_generate_stream_without_stream_sends_one_event(server: TritonServer, whole: Answer) -> None:
    status, events = generate_stream(server, "continuous", generate_body("continuous", PROMPT, max_tokens=NUM_TOKENS))
    assert (status, [event["text_output"] for event in events]) == (200, [whole.text])


@pytest.mark.parametrize("model", ["continuous_unary", "static", "dynamic"])
def test_plain_inference_answers_over_grpc_and_http(server: TritonServer, whole: Answer, model: str) -> None:
    assert ask(server, model, PROMPT, max_tokens=NUM_TOKENS).text == whole.text
    with triton_http.InferenceServerClient(server.http_url) as client:
        shape = [1] if model == "continuous_unary" else [1, 1]
        inputs = []
        for name, value in (("text_input", PROMPT.encode()), ("sampling_parameters", sampling_json(max_tokens=12))):
            tensor = triton_http.InferInput(name, shape, "BYTES")
            tensor.set_data_from_numpy(np.array([value], dtype=object).reshape(shape), binary_data=True)
            inputs.append(tensor)
        result = client.infer(model, inputs)
    assert result.as_numpy("text_output").tolist() == np.full(shape, whole.text.encode(), dtype=object).tolist()
    assert generate(server, model, generate_body(model, PROMPT, max_tokens=12))[1]["text_output"] == whole.text


def test_plain_inference_on_a_streaming_model_is_refused_by_the_server(server: TritonServer) -> None:
    """TRI-03: README: "take `continuous_unary`"."""
    for model in STREAMING:
        inputs = inputs_for(model, PROMPT, sampling_json(max_tokens=1))
        with triton_grpc.InferenceServerClient(server.grpc_url) as client, pytest.raises(Exception, match="decoupled"):
            client.infer(model, inputs)
        tensors = [
            {"name": "text_input", "datatype": "BYTES", "shape": [1] * len(inputs[0].shape()), "data": [PROMPT]},
            {"name": "sampling_parameters", "datatype": "BYTES", "shape": [1] * len(inputs[0].shape()), "data": ["{}"]},
        ]
        assert post(server, f"models/{model}/infer", {"inputs": tensors})[0] in (400, 501)


@pytest.mark.parametrize("model", STREAMING)
def test_generate_on_a_stream_says_that_generate_stream_is_for_it(server: TritonServer, model: str) -> None:
    """TRI-03: as Triton does, with status 200."""
    status, answer = generate(server, model, generate_body(model, PROMPT, stream=True, max_tokens=4))
    assert (status, list(answer)) == (200, ["error"])
    assert "exactly 1 response, use generate stream" in answer["error"]


@pytest.mark.parametrize("num_rows", [1, 3, 16])
def test_static_answers_every_row_of_a_client_batch(
    server: TritonServer, golden: dict[str, list[int]], num_rows: int
) -> None:
    prompts = [PROMPTS[row % len(PROMPTS)] for row in range(num_rows)]
    lengths = [2 + row % 5 for row in range(num_rows)]
    answers = ask_batch(server, prompts, [sampling_json(max_tokens=length) for length in lengths])
    assert [answer.ids for answer in answers] == [
        golden[prompt][:length] for prompt, length in zip(prompts, lengths, strict=True)
    ]
    assert [answer.num_output_tokens for answer in answers] == lengths


def test_static_refuses_more_rows_than_a_batch_has(server: TritonServer) -> None:
    with pytest.raises(Refused, match="batch-size must be <= 16") as error:
        ask_batch(server, [PROMPT] * 17, [sampling_json(max_tokens=1)] * 17)
    assert error.value.code == "INVALID_ARGUMENT"


def test_the_prompt_is_echoed_only_where_asked_for(server: TritonServer, whole: Answer) -> None:
    body = generate_body("continuous", PROMPT, max_tokens=NUM_TOKENS) | {"exclude_input_in_output": False}
    assert generate(server, "continuous", body)[1]["text_output"] == PROMPT + whole.text
    events = generate_stream(server, "continuous", body | {"stream": True})[1]
    assert "".join(event["text_output"] for event in events) == PROMPT + whole.text


def test_token_ids_and_their_text_get_the_same_answer(server: TritonServer, golden: dict[str, list[int]]) -> None:
    # The ids of an answer, as a prompt.
    ids = golden[PROMPT][:8]
    with GrpcStream(server) as stream:
        inputs = [
            numpy_tensor("input_ids", np.array(ids, np.int32), "INT32"),
            *inputs_for("continuous", "", sampling_json(max_tokens=6))[1:],
        ]
        by_ids = stream.send("continuous", inputs=inputs).answer()
    text = generate(server, "continuous", generate_body("continuous", PROMPT, max_tokens=8))[1]["text_output"]
    by_text = ask(server, "continuous", text, max_tokens=6)
    assert (by_ids.ids, by_ids.num_input_tokens) == (by_text.ids, 8)


def test_scalar_request_parameters_stand_in_for_sampling_parameters(
    server: TritonServer, golden: dict[str, list[int]], whole: Answer
) -> None:
    status, answer = generate(server, "continuous", {"text_input": PROMPT, "max_tokens": 12, "temperature": 0})
    assert (status, answer["text_output"]) == (200, whole.text)
    with GrpcStream(server) as stream:
        inputs = [text_tensor("text_input", [PROMPT], [1])]
        stream._client.async_stream_infer("continuous", inputs, parameters={"max_tokens": 12, "temperature": 0})
        assert stream.receive().text == whole.text
    # What stands in both places counts as it stands in sampling_parameters.
    body = generate_body("continuous", PROMPT, max_tokens=4) | {"max_tokens": 400}
    assert generate(server, "continuous", body)[1]["num_output_tokens"] == 4


def test_our_client_tells_interleaved_requests_on_one_stream_apart(
    server: TritonServer, golden: dict[str, list[int]]
) -> None:
    """TRI-04: eight answers piece by piece in turn, each as it is alone; the error of a ninth request ends no other."""
    greedy: SamplingOptions = {"max_tokens": NUM_TOKENS, "temperature": 0, "return_token_ids": True}
    chunks: dict[str, list[Chunk]] = {prompt: [] for prompt in PROMPTS}
    with SlipstreamClient(server.grpc_url) as client:
        alone = {prompt: client.generate(prompt, **greedy).text for prompt in PROMPTS}
        running = {prompt: client.stream(prompt, **greedy) for prompt in PROMPTS}
        one_stream = client._shared._connection
        first = {prompt: next(stream) for prompt, stream in running.items()}
        with pytest.raises(RequestFailed, match="temperature"):
            next(client.stream(PROMPT, temperature=-1))
        for prompt, chunk in first.items():
            chunks[prompt].append(chunk)
        while running:
            for prompt, stream in list(running.items()):
                chunk = next(stream, None)
                if chunk is None:
                    del running[prompt]
                else:
                    chunks[prompt].append(chunk)
        assert client._shared._connection is one_stream
    for prompt, received in chunks.items():
        assert "".join(chunk.text for chunk in received) == alone[prompt]
        assert received[-1].stats is not None
        assert received[-1].stats["output_ids"] == golden[prompt][:NUM_TOKENS]
        assert [chunk.final for chunk in received] == [False] * (len(received) - 1) + [True]


def test_stats_say_how_the_request_fared(server: TritonServer, golden: dict[str, list[int]]) -> None:
    stats = ask(server, "continuous", PROMPT, max_tokens=5).stats
    assert stats["output_ids"] == golden[PROMPT][:5]
    assert stats["num_output_tokens"] == 5
    assert (stats["cached_tokens"], stats["preemptions"]) == (0, 0)
    assert stats["waited_for"] == {"seats": 0, "blocks": 0, "budget": 0, "priority": 0}
    assert 0 <= stats["queue_ms"] <= stats["first_token_ms"] <= stats["queue_ms"] + stats["inference_ms"]
    without_ids = ask(server, "continuous", PROMPT, max_tokens=2, return_token_ids=False).stats
    assert "output_ids" not in without_ids
