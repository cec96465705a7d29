"""How near a tie was that two executors decided differently: the native log-probabilities of both tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from slipstream_client.client import SlipstreamClient
from slipstream_client.load.records import RequestRecord
from slipstream_client.load.workload import WorkloadRequest
from slipstream_client.tensors import RequestFailed

_LIKELIEST = 20
_MOST = 20  # differences of each variant that are looked into


def add_margins(
    agreement: Mapping[str, dict[str, Any]],
    records: Iterable[RequestRecord],
    requests: Mapping[str, Mapping[int, WorkloadRequest]],
    url: str,
    model: str,
) -> None:
    """Note in the first differences by how much the native token was likelier, in natural logarithms of probability.

    Args:
        agreement: of `compare_answers`; its differences get a `margin`, None where the other token was not among the
            twenty likeliest or the server does not say.
        requests: those of each run, by index.
        url: gRPC endpoint of the server.
        model: a native model of it that gives log-probabilities.
    """
    by_id = {record.id: record for record in records}
    with SlipstreamClient(url, model, timeout_s=60.0) as client:
        for seen in agreement.values():
            for difference in seen["different"][:_MOST]:
                record, reference = by_id[difference["request"]], by_id[difference["reference"]]
                request = requests[reference.run][reference.index]
                difference["margin"] = _margin(client, request, record, reference, difference["first_difference"])


def _margin(
    client: SlipstreamClient, request: WorkloadRequest, record: RequestRecord, reference: RequestRecord, at: int
) -> float | None:
    """The native answer is asked for once more, up to the token in question."""
    assert record.output_ids is not None
    assert reference.output_ids is not None
    if at >= min(len(record.output_ids), len(reference.output_ids)):
        return None  # one ended before the other
    sampling = {key: value for key, value in request.sampling().items() if key != "stop_length"}
    sampling |= {"max_tokens": at + 1, "logprobs": _LIKELIEST}
    try:
        answer = client.generate(request.text, **sampling)
    except RequestFailed:
        return None
    if answer.logprobs is None or len(answer.logprobs) <= at:
        return None
    likeliest = answer.logprobs[at]
    ours, theirs = (likeliest.get(str(ids[at])) for ids in (reference.output_ids, record.output_ids))
    return ours["logprob"] - theirs["logprob"] if ours and theirs else None
