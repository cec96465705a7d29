"""Requests that fail, by the hundred: each gets an error of its own, and nothing of them is held afterwards."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers import MODELS, PROMPTS, STREAMING, GrpcStream, Refused, ask, infer, inputs_for
from slipstream_client.server.paths import SHARED_MEMORY
from slipstream_client.server.stubs import living_stubs
from slipstream_client.server.tritonserver import TritonServer

pytestmark = pytest.mark.server

# With a thousandth of a region of 1 MiB for each, a leak of what is sent would let the region grow many times.
PADDING = b" " * 16384
FAILING = (
    b'{"max_tokens": 0}' + PADDING,
    b'{"foo": 1}' + PADDING,
    b"[]" + PADDING,
    b'{"temperature": ' + PADDING,
)
# Five models, so a thousand in all; and as many again to show that nothing grows with them.
ROUND = 200


def shared_memory(server: TritonServer, model: str) -> int:
    """Bytes of the region through which Triton and the model's process talk."""
    (stub,) = [stub for stub in living_stubs(server.pid) if stub.model == model]
    return (SHARED_MEMORY / stub.region).stat().st_size


def fail_on_one_stream(server: TritonServer, model: str) -> list[Refused]:
    errors = []
    with GrpcStream(server) as stream:
        for number in range(ROUND):
            stream.send(model, inputs=inputs_for(model, PROMPTS[0], FAILING[number % len(FAILING)]))
            with pytest.raises(Refused) as error:
                stream.receive()
            errors.append(error.value)
        # What ends the next request is its own: nothing else came for those before it.
        assert stream.send(model, PROMPTS[0], max_tokens=1, request_id="next").receive().request_id == "next"
        assert stream.quiet
    return errors


def fail_one_by_one(server: TritonServer, model: str) -> list[Refused]:
    def fail(number: int) -> Refused:
        with pytest.raises(Refused) as error:
            infer(server, model, inputs_for(model, PROMPTS[0], FAILING[number % len(FAILING)]))
        return error.value

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(fail, range(ROUND)))


@pytest.mark.parametrize("model", MODELS)
def test_execute_never_raises_and_the_shared_memory_stays_as_it_is(
    server: TritonServer, golden: dict[str, list[int]], model: str
) -> None:
    """ENG-07."""
    fail = fail_on_one_stream if model in STREAMING else fail_one_by_one
    fail(server, model)
    before = shared_memory(server, model)
    errors = fail(server, model)
    assert shared_memory(server, model) == before
    # Each is the door's own answer; Triton's to an execute() that raised has no code and says so.
    assert [error.code for error in errors] == ["INVALID_ARGUMENT"] * ROUND
    assert "Failed to process the request" not in server.log_path.read_text(errors="replace")
    assert ask(server, model, PROMPTS[0], max_tokens=4).ids == golden[PROMPTS[0]][:4]
