"""What one step computes: chunks of sequences, each a run of consecutive tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.engine.request import Request


@dataclass(slots=True)
class Chunk:
    """Consecutive tokens of one sequence that are put through the model in one step.

    `token_ids[i]` goes to cache slot `start + i` of the sequence, counted with its left padding. A chunk that reaches
    the sequence's last known token is sampled.
    """

    request: Request
    token_ids: list[int]
    start: int
    sample: bool

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """Whether it is nothing but the newest token of an answer."""
        return self.sample and self.num_tokens == 1 and self.request.num_output_tokens > 0


@dataclass(slots=True)
class Batch:
    """The chunks of one step, and how many of their rows are padding that serves no request."""

    chunks: list[Chunk] = field(default_factory=list)
    num_padding_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_useful_tokens(self) -> int:
        return self.num_tokens - self.num_padding_tokens

    @property
    def sampled(self) -> list[Chunk]:
        return [chunk for chunk in self.chunks if chunk.sample]
