"""Log-probabilities as clients see them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache

from slipstream.doors.text import TextCodec
from slipstream.engine.request import TokenLogprobs


def logprobs_json(scored: Iterable[TokenLogprobs | None], codec: TextCodec) -> str:
    """A JSON list with one object for each token, or null where nothing is known of it.

    An object has the token and the likeliest in its place, by token id, in vLLM's form with the `bytes` of each beside
    it. A token that is only part of a character shows as U+FFFD; its bytes tell it from others that do.

    The scores of a long prompt are 20 MB of this. They are written piece by piece: one call of the JSON encoder for all
    of them would keep every other answer of the door waiting for a second.
    """
    return f"[{', '.join(['null' if scores is None else _entry(scores, codec) for scores in scored])}]"


def _entry(scores: TokenLogprobs, codec: TextCodec) -> str:
    token_id, *likeliest = scores.ids
    ranks = {token_id: scores.rank} | {other: rank for rank, other in enumerate(likeliest, 1) if other != token_id}
    values = dict(zip(scores.ids, scores.values, strict=True))
    members = [
        f'"{each}": {{"logprob": {json.dumps(values[each])}, "rank": {rank}, {_spelling(codec, each)}}}'
        for each, rank in ranks.items()
    ]
    return f"{{{', '.join(members)}}}"


@lru_cache(maxsize=1 << 16)
def _spelling(codec: TextCodec, token_id: int) -> str:
    """The members of an entry that are the same wherever the token stands."""
    spelled = codec.token_bytes(token_id)
    return f'"decoded_token": {json.dumps(spelled.decode(errors="replace"))}, "bytes": {list(spelled)}'
