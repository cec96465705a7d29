"""Stream an answer over gRPC with plain tritonclient. Start a server first: `slipstream serve --models continuous`."""

import json
import queue

import numpy as np
import tritonclient.grpc as triton


def tensor(name: str, datatype: str, value: object) -> triton.InferInput:
    """An input of shape [1]."""
    array = np.array([value], dtype=np.object_ if datatype == "BYTES" else bool)
    return triton.InferInput(name, [1], datatype).set_data_from_numpy(array)


sampling = {"max_tokens": 48, "temperature": 0}
inputs = [
    tensor("text_input", "BYTES", b"Once upon a time"),
    tensor("sampling_parameters", "BYTES", json.dumps(sampling).encode()),
    tensor("stream", "BOOL", True),
]
responses: queue.Queue = queue.Queue()
# Closed before the program ends: a client that is still open then now and then hangs in gRPC.
with triton.InferenceServerClient("127.0.0.1:8001") as client:
    # A decoupled model answers one request with many responses, so the answers come to a callback.
    client.start_stream(lambda result, error: responses.put((result, error)))
    client.async_stream_infer("continuous", inputs, request_id="example-1")
    final = False
    while not final:
        result, error = responses.get()
        if error is not None:
            raise error
        # Each response carries the text that is new, and the last one says that it is the last.
        print(result.as_numpy("text_output")[0].decode(), end="", flush=True)
        final = result.get_response().parameters["triton_final_response"].bool_param
    print()
