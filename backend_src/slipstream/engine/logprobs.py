"""How likely tokens were: log-probabilities by the model's own distribution, vectorised over rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.engine.request import MOST_LOGPROBS, TokenLogprobs


def score(logits: torch.Tensor, token_ids: Sequence[int], num_likeliest: Sequence[int]) -> list[TokenLogprobs]:
    """What each row of `logits` [num_rows, vocab] says of its token, and of as many of the likeliest ones as wanted.

    The likeliest come in order, among equals the lowest id first. What a row gets depends on that row alone.
    """
    logits = logits.float()
    ids = torch.tensor(token_ids, device=logits.device)[:, None]
    own = logits.gather(1, ids)
    ranks = ((logits > own).sum(-1) + 1).tolist()
    values = torch.log_softmax(logits, dim=-1)
    own_values = values.gather(1, ids)[:, 0].tolist()
    # As many for every row, so that a row's list does not depend on what the others want.
    most = min(MOST_LOGPROBS, logits.shape[1])
    likeliest, places = values.topk(most, dim=-1) if any(num_likeliest) else (values[:, :0], ids[:, :0])
    all_likeliest, all_places = likeliest.tolist(), places.tolist()
    scored = []
    for row, wanted in enumerate(num_likeliest):
        pairs = zip(all_likeliest[row], all_places[row], strict=True)
        kept = sorted(pairs, key=lambda pair: (-pair[0], pair[1]))[:wanted]
        scored.append(
            TokenLogprobs(
                ids=[token_ids[row], *(token_id for _, token_id in kept)],
                values=[own_values[row], *(value for value, _ in kept)],
                rank=ranks[row],
            )
        )
    return scored
