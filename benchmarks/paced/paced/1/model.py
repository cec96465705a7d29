"""Answers at times that are fixed on arrival, and says in `stats` when it did: what a load generator ought to find.

Needs neither an engine nor a language model. Times are those of the machine's monotonic clock, which a client on the
same machine shares; `sent_s` is from before a token is handed to Triton, so what a client adds to it is transport.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

# Has its space before it, so that any number of them has as many tokens.
_WORD = " time"
_DEFAULT_MAX_TOKENS = 16


class TritonPythonModel:
    """One thread for each request that is being answered, so that none waits for another."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the pace."""
        parameters = json.loads(args["model_config"])["parameters"]
        self._first_token_s, self._token_s = (
            float(parameters[name]["string_value"]) / 1000 for name in ("first_token_ms", "token_ms")
        )
        self._threads: set[threading.Thread] = set()

    def execute(self, requests: Sequence[Any]) -> None:
        """Start to answer, and return at once."""
        arrival_s = time.monotonic()
        for request in requests:
            text = _read(request, "text_input") or ""
            given = json.loads(request.parameters() or "{}") | json.loads(_read(request, "sampling_parameters") or "{}")
            max_tokens = int(given.get("max_tokens") or _DEFAULT_MAX_TOKENS)
            num_tokens = min(int(given.get("stop_length") or max_tokens), max_tokens)
            arguments = (
                request.get_response_sender(),
                arrival_s,
                len(text.split()),
                num_tokens,
                "stop" if given.get("stop_length") == num_tokens else "length",
            )
            # A daemon: where the server is killed, what it sends is waited for in vain.
            thread = threading.Thread(target=self._answer, args=arguments, daemon=True)
            self._threads = {each for each in self._threads if each.is_alive()} | {thread}
            thread.start()

    def finalize(self) -> None:
        """Wait for the answers that are under way."""
        for thread in self._threads:
            thread.join()

    def _answer(
        self, sender: Any, arrival_s: float, num_input_tokens: int, num_tokens: int, finish_reason: str
    ) -> None:
        """Send the tokens of one answer. One that is late does not make the next one late."""
        sent_s: list[float] = []
        for position in range(num_tokens):
            due = arrival_s + self._first_token_s + position * self._token_s
            time.sleep(max(0.0, due - time.monotonic()))
            if sender.is_cancelled():
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                return
            sent_s.append(time.monotonic())
            last = position == num_tokens - 1
            outputs = {
                "text_output": _WORD,
                "finish_reason": finish_reason if last else "",
                "num_input_tokens": num_input_tokens,
                "num_output_tokens": 1,
                "stats": json.dumps(_stats(arrival_s, sent_s)) if last else "",
            }
            sender.send(
                pb_utils.InferenceResponse([_tensor(name, value) for name, value in outputs.items()]),
                flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0,
            )


def _stats(arrival_s: float, sent_s: Sequence[float]) -> dict[str, Any]:
    return {
        "arrival_s": arrival_s,
        "sent_s": list(sent_s),
        "queue_ms": 0.0,
        "first_token_ms": (sent_s[0] - arrival_s) * 1000,
        "inference_ms": (sent_s[-1] - arrival_s) * 1000,
    }


def _read(request: Any, name: str) -> str | None:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy().ravel()[0].decode("utf-8")


def _tensor(name: str, value: str | int) -> Any:
    values = np.array([value], np.uint32) if isinstance(value, int) else np.array([value.encode()], np.object_)
    return pb_utils.Tensor(name, values)
