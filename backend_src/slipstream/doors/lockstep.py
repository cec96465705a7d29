"""The doors `static` (the client sends the batch) and `dynamic` (Triton's dynamic batcher forms it).

`execute` holds until its batch is done, so that Triton's queue fills behind it and the next batch is a full one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

from slipstream.doors.collector import Collector
from slipstream.doors.door import (
    Door,
    count_tensor,
    error_response,
    output_error,
    read_column,
    request_parameters,
    stats_json,
    text_tensor,
)
from slipstream.doors.fields import RequestFields, read_values
from slipstream.engine.messages import NewRequest, Output
from slipstream.errors import InvalidRequest

_CANCEL_POLL_S = 0.1


class LockstepDoor(Door):
    """Whole answers from an engine that computes batches in lock step."""

    def initialize(self, args: dict[str, str]) -> None:
        """See Door.initialize."""
        self._collector = Collector()
        super().initialize(args)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Compute a batch to its end; the rows of all requests go to the engine together."""
        rows: dict[int, list[tuple[NewRequest, RequestFields]]] = {}
        errors: dict[int, Exception] = {}
        for index, request in enumerate(requests):
            try:
                rows[index] = self._rows(request)
            except Exception as error:
                errors[index] = error
        batch = [new for group in rows.values() for new, _ in group]
        try:
            outputs = self._compute(batch, requests, rows)
        except Exception as error:
            errors |= dict.fromkeys(rows, error)
            outputs = {}
        batch_end_s = max((output.stats.end_s for output in outputs.values() if output.stats), default=0.0)
        responses = []
        for index in range(len(requests)):
            try:
                if index in errors:
                    raise errors[index]
                responses.append(self._response(rows[index], outputs, batch_end_s))
            except Exception as error:
                responses.append(error_response(error))
        return responses

    def _rows(self, request: Any) -> list[tuple[NewRequest, RequestFields]]:
        texts, sampling = read_column(request, "text_input"), read_column(request, "sampling_parameters")
        if not texts or not sampling or len(texts) != len(sampling):
            raise InvalidRequest("text_input and sampling_parameters are both needed, one element a row")
        parameters = request_parameters(request)
        rows = []
        for number, (text, json_text) in enumerate(zip(texts, sampling, strict=True)):
            try:
                values = read_values(json_text, parameters)
                rows.append(self._read(self._codec.encode(text, "text_input"), values, stream=False))
            except InvalidRequest as error:
                raise InvalidRequest(f"row {number}: {error}" if len(texts) > 1 else str(error)) from None
        return rows

    def _compute(
        self, batch: list[NewRequest], requests: Sequence[Any], rows: dict[int, list[tuple[NewRequest, RequestFields]]]
    ) -> dict[int, Output]:
        """Submit the batch and wait for all of its rows; a request that its client cancels ends early."""
        if not batch:
            return {}

        def cancel_abandoned(awaited: set[int]) -> None:
            for index, group in rows.items():
                ids = [new.id for new, _ in group]
                if awaited.intersection(ids) and requests[index].is_cancelled():
                    self._link.cancel(ids)

        self._collector.expect([new.id for new in batch])
        self._link.submit(batch)
        return self._collector.wait(cancel_abandoned, _CANCEL_POLL_S)

    def _response(
        self, rows: list[tuple[NewRequest, RequestFields]], outputs: dict[int, Output], batch_end_s: float
    ) -> Any:
        answers = [(new, fields, outputs[new.id]) for new, fields in rows]
        for _, _, output in answers:
            error = output_error(output)
            if error is not None:
                raise error
        shape = (len(rows), 1)
        texts = [self._codec.decode(f.shown(o.token_ids), f.skip_special_tokens) for _, f, o in answers]
        stats = [
            stats_json(o.stats, fields, len(new.prompt_ids), o.token_ids, batch_end_s=batch_end_s)
            for new, fields, o in answers
        ]
        return pb_utils.InferenceResponse(
            output_tensors=[
                text_tensor("text_output", texts, shape),
                text_tensor("finish_reason", [o.finish_reason or "" for _, _, o in answers], shape),
                count_tensor("num_input_tokens", [len(new.prompt_ids) for new, _, _ in answers], shape),
                count_tensor("num_output_tokens", [len(o.token_ids) for _, _, o in answers], shape),
                text_tensor("stats", stats, shape),
            ]
        )

    def _on_output(self, output: Output) -> None:
        self._collector.deliver(output)

    def _fail_all(self, reason: str) -> None:
        self._collector.fail(reason)
