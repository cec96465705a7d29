"""From logits to token ids, vectorised over the batch. What a row gets depends on that row alone."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.engine.logits import edit_logits
from slipstream.engine.noise import uniform
from slipstream.engine.request import NOT_FINITE, NOTHING_ALLOWED, SAMPLING_FAILED, Request

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Logits:
    """What a model says of the next token of some rows."""

    values: torch.Tensor  # [num_rows, vocab]
    highest: torch.Tensor  # [num_rows], not finite where one of the row's is NaN or plus infinity
    token_ids: torch.Tensor  # [num_rows] int64, the lowest id among those that have the highest

    @classmethod
    def of(cls, values: torch.Tensor) -> Logits:
        """With the highest looked up."""
        return cls(values, *values.max(dim=-1))

    def __getitem__(self, rows: slice) -> Logits:
        return Logits(self.values[rows], self.highest[rows], self.token_ids[rows])


def sample_each(logits: Logits, requests: list[Request]) -> list[int]:
    """As `sample`; a request with which that fails gets `SAMPLING_FAILED`, and the others their tokens."""
    try:
        return sample(logits, requests)
    except Exception as error:
        if len(requests) > 1:
            return [sample_each(logits[row : row + 1], [request])[0] for row, request in enumerate(requests)]
        log.exception("no token could be chosen for request %s: %s", requests[0].key[1], error)
        return [SAMPLING_FAILED]


def sample(found: Logits, requests: list[Request]) -> list[int]:
    """Choose the next token of each request from its row of the logits.

    First each request edits its logits (`edit_logits`). Greedy rows then take the highest one, the lowest id among
    equals. The others are drawn by inverse transform from softmax(logits / temperature), cut to top_k, then to the
    smallest set that holds top_p, then to what has at least min_p of the highest probability (the order of
    transformers' `generate`); the number drawn depends on the request's seed, choice index and output index alone. A
    row whose logits are not finite gives `NOT_FINITE`, one with nothing left to choose from `NOTHING_ALLOWED`.
    """
    logits = found.values
    finite = [math.isfinite(highest) for highest in found.highest.tolist()]
    token_ids: list[int] = found.token_ids.tolist()
    edited = [row for row, request in enumerate(requests) if request.edits_logits]
    if edited:
        rows = torch.tensor(edited, device=logits.device)
        new = edit_logits(logits[rows], [requests[row] for row in edited])
        logits = logits.float().index_copy(0, rows, new)
        for row, highest, token_id in zip(edited, *(column.tolist() for column in new.max(dim=-1)), strict=True):
            token_ids[row] = NOTHING_ALLOWED if highest == -math.inf else token_id
    drawn = [
        row
        for row, request in enumerate(requests)
        if not request.sampling.greedy and finite[row] and token_ids[row] != NOTHING_ALLOWED
    ]
    if drawn:
        chosen = _draw(logits[torch.tensor(drawn, device=logits.device)], [requests[row] for row in drawn])
        for row, token_id in zip(drawn, chosen.tolist(), strict=True):
            token_ids[row] = token_id
    return [token_id if is_finite else NOT_FINITE for token_id, is_finite in zip(token_ids, finite, strict=True)]


def _draw(logits: torch.Tensor, requests: list[Request]) -> torch.Tensor:
    """One id for each row of `logits` [num_drawn, vocab], by each request's parameters."""
    device, vocab = logits.device, logits.shape[1]
    sampling = [request.sampling for request in requests]

    def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)[:, None]

    temperature = column([s.temperature for s in sampling], torch.float32)
    top_k = column([s.top_k if s.top_k > 0 else vocab for s in sampling], torch.long)
    top_p = column([s.top_p for s in sampling], torch.float32)
    min_p = column([s.min_p for s in sampling], torch.float64)
    numbers = uniform(
        np.array([s.seed for s in sampling], np.uint64),
        np.array([request.choice for request in requests], np.uint64),
        np.array([request.num_output_tokens for request in requests], np.uint64),
    )

    # Subtracting the highest logit first keeps any temperature from overflowing.
    scaled = (logits.float() - logits.float().amax(-1, keepdim=True)) / temperature
    ordered, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=device)
    probability = torch.softmax(ordered.masked_fill(rank >= top_k, -torch.inf), dim=-1, dtype=torch.float64)
    before = probability.cumsum(-1) - probability
    # The most likely token always stays: with top_p = 0 it is the only one.
    unlikely = (before >= top_p) | (probability < min_p * probability[:, :1])
    kept = probability.masked_fill(unlikely & (rank > 0), 0.0)
    cumulative = kept.cumsum(-1)
    target = torch.from_numpy(numbers).to(device)[:, None] * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, target, right=True).clamp(max=vocab - 1)
    # The last place with any probability, should rounding put the target behind it; a row of NaN has none.
    last = ((kept > 0).sum(-1, keepdim=True) - 1).clamp(min=0)
    return ids.gather(1, torch.minimum(place, last))[:, 0]
