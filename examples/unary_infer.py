"""Ask with a plain infer() call, as for any model. Start a server first: `slipstream serve --models continuous_unary`.

`continuous_unary` shares its engine with `continuous`: the same weights, the same KV cache, the same scheduler.
"""

import json

import numpy as np
import tritonclient.http as triton

client = triton.InferenceServerClient("127.0.0.1:8000")


def text(name: str, value: str) -> triton.InferInput:
    """A string input of shape [1]."""
    return triton.InferInput(name, [1], "BYTES").set_data_from_numpy(np.array([value.encode()], dtype=np.object_))


def flag(name: str) -> triton.InferInput:
    """A boolean input of shape [1] that is true."""
    return triton.InferInput(name, [1], "BOOL").set_data_from_numpy(np.array([True]))


result = client.infer(
    "continuous_unary",
    [
        text("text_input", "Once upon a time"),
        text("sampling_parameters", json.dumps({"max_tokens": 48, "temperature": 0})),
        flag("return_finish_reason"),  # outputs other than the text are asked for by name
    ],
)
print(result.as_numpy("text_output")[0].decode())
print("finish reason:", result.as_numpy("finish_reason")[0].decode())
