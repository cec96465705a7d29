"""Ask over HTTP, whole and streamed, with the standard library. Start a server first: `slipstream serve`."""

import json
import urllib.request

BODY = {
    "text_input": "Once upon a time",
    # Sampling parameters travel as one string of JSON: it can hold what Triton's own fields cannot, such as lists.
    "sampling_parameters": json.dumps({"max_tokens": 48, "temperature": 0}),
}


def post(endpoint: str, body: dict):
    """Open the response to a JSON body; an error of the server raises urllib.error.HTTPError."""
    url = f"http://127.0.0.1:8000/v2/models/continuous/{endpoint}"
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()))


# One response with the whole answer.
with post("generate", BODY) as response:
    print(json.load(response)["text_output"])

# Server-sent events, one for each piece of text: lines that begin with "data: ", with an empty line between them.
with post("generate_stream", BODY | {"stream": True}) as response:
    for line in response:
        if line.startswith(b"data: "):
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:  # a request that fails half-way says so in its last event
                raise RuntimeError(event["error"])
            print(event["text_output"], end="", flush=True)
print()
