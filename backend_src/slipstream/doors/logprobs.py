"""Log-probabilities as clients see them."""

from __future__ import annotations

from typing import Any

from slipstream.doors.text import TextCodec
from slipstream.engine.request import TokenLogprobs


def logprobs_entry(scores: TokenLogprobs, codec: TextCodec) -> dict[int, dict[str, Any]]:
    """One token and the likeliest in its place, by token id, in vLLM's form with the `bytes` of each beside it.

    A token that is only part of a character shows as U+FFFD; its bytes tell it from others that do.
    """
    token_id, *likeliest = scores.ids
    ranks = {token_id: scores.rank} | {other: rank for rank, other in enumerate(likeliest, 1) if other != token_id}
    values = dict(zip(scores.ids, scores.values, strict=True))
    spelled = {each: codec.token_bytes(each) for each in ranks}
    return {
        each: {
            "logprob": values[each],
            "rank": rank,
            "decoded_token": spelled[each].decode(errors="replace"),
            "bytes": list(spelled[each]),
        }
        for each, rank in ranks.items()
    }
