"""What a request does to its logits before a token is chosen: bias, allowed and forbidden tokens, penalties.

Everything is derived from the request's parameters and token ids, so it means the same after a preemption or a prefix
hit, and a row depends on its own request alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from slipstream.engine.request import Request


def edit_logits(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """The edited copy, [num_requests, vocab] float32, of one row of logits for each request.

    In this order, which is that of vLLM: `logit_bias`, `allowed_token_ids`, forbidden sequences (`bad_words`,
    `bad_token_ids`), `min_tokens`, `repetition_penalty` over prompt and output (Keskar et al., 2019),
    `frequency_penalty` and `presence_penalty` over the output (OpenAI's definition). A forbidden token has minus
    infinity.
    """
    logits = logits.float().clone()
    _add_bias(logits, requests)
    _forbid(logits, requests)
    penalised = [row for row, request in enumerate(requests) if request.sampling.penalises]
    if penalised:
        rows = torch.tensor(penalised, device=logits.device)
        logits[rows] = _penalise(logits[rows], [requests[row] for row in penalised])
    return logits


def _add_bias(logits: torch.Tensor, requests: Sequence[Request]) -> None:
    biases = [(row, *bias) for row, request in enumerate(requests) for bias in request.sampling.logit_bias.items()]
    if biases:
        rows, ids, values = zip(*biases, strict=True)
        logits[list(rows), list(ids)] += torch.tensor(values, device=logits.device)


def _forbid(logits: torch.Tensor, requests: Sequence[Request]) -> None:
    for row, request in enumerate(requests):
        allowed = request.sampling.allowed_token_ids
        if allowed:
            kept = logits[row, list(allowed)].clone()
            logits[row] = -torch.inf
            logits[row, list(allowed)] = kept
        forbidden = list(_forbidden(request))
        if forbidden:
            logits[row, forbidden] = -torch.inf


def _forbidden(request: Request) -> Iterable[int]:
    """Tokens that would complete a forbidden sequence, or end the answer too early."""
    for *beginning, last in request.sampling.bad_sequences:
        # Only the answer is held against it: what the prompt says is the prompt's business.
        if request.num_output_tokens >= len(beginning) and request.token_ids[
            request.num_tokens - len(beginning) :
        ] == list(beginning):
            yield last
    if request.num_output_tokens < request.sampling.min_tokens:
        yield from request.end_token_ids


def _penalise(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Rows [num_penalised, vocab] after the three penalties."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=logits.device)[:, None]

    def counts(ids: list[list[int]]) -> torch.Tensor:
        """How often each token stands in the list of its row, [num_penalised, vocab]."""
        rows = np.repeat(np.arange(len(ids)), [len(row) for row in ids])
        columns = np.concatenate([np.asarray(row, np.int64) for row in ids])
        places = (torch.from_numpy(rows).to(logits.device), torch.from_numpy(columns).to(logits.device))
        ones = torch.ones(len(columns), device=logits.device)
        return torch.zeros_like(logits).index_put_(places, ones, accumulate=True)

    sampling = [request.sampling for request in requests]
    seen = counts([request.token_ids for request in requests]) > 0
    output = counts([request.output_ids for request in requests])
    repetition = column([s.repetition_penalty for s in sampling])
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, repeated, logits)
    return (
        logits
        - column([s.frequency_penalty for s in sampling]) * output
        - column([s.presence_penalty for s in sampling]) * (output > 0)
    )
