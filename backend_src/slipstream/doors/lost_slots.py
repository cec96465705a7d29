"""Giving back the slots of iterative sequences that Triton has dropped.

A sequence that is cancelled while it waits in Triton's queue for its next call is dropped there, and its slot stays
taken until it has been idle for `max_sequence_idle_microseconds`. A new sequence of the same correlation id takes the
slot over, and gives it back when it ends. One that is dropped before its first call was never seen by the model, and
its slot is lost until then.
"""

from __future__ import annotations

import threading
from typing import Any

import triton_python_backend_utils as pb_utils


class LostSlots:
    """Starts sequences that end at once, from threads of their own: each waits for a call of the model itself."""

    def __init__(self, model_name: str, inputs: list[Any]) -> None:
        self._model_name = model_name
        self._inputs = inputs  # what the model's configuration wants; nobody reads them
        self._recovering: set[int] = set()

    def __contains__(self, correlation_id: int) -> bool:
        """Whether a sequence with this id was started here; the model is to end it with its first call."""
        return correlation_id in self._recovering

    def recover(self, correlation_id: int) -> None:
        """Give back the slot of a sequence that will not be named again; returns at once."""
        self._recovering.add(correlation_id)
        threading.Thread(target=self._take_over, args=(correlation_id,), name="lost-slot", daemon=True).start()

    def _take_over(self, correlation_id: int) -> None:
        try:
            request = pb_utils.InferenceRequest(
                model_name=self._model_name,
                requested_output_names=["text_output"],
                inputs=self._inputs,
                correlation_id=correlation_id,
                flags=pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
            )
            for _ in request.exec(decoupled=True):
                pass
        except Exception as error:
            pb_utils.Logger.log_warn(f"the slot of sequence {correlation_id} could not be given back: {error}")
        finally:
            self._recovering.discard(correlation_id)
