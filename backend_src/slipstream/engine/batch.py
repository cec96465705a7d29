"""What one step computes: chunks of sequences, each a run of consecutive tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.engine.request import Request, TokenLogprobs


@dataclass(slots=True)
class Chunk:
    """Consecutive tokens of one sequence that are put through the model in one step.

    `token_ids[i]` goes to cache slot `start + i` of the sequence, counted with its left padding. A chunk that reaches
    the sequence's last known token is sampled. `copy` is a block of another sequence and the block that `start` lies
    in, into which its contents are to be copied before anything is computed.
    """

    request: Request
    token_ids: list[int]
    start: int
    sample: bool
    copy: tuple[int, int] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """Whether it is nothing but the newest token of an answer."""
        return self.sample and len(self.token_ids) == 1 and self.request.num_output_tokens > 0

    @property
    def num_recomputed(self) -> int:
        """Its tokens that had been computed when the sequence was last preempted."""
        return min(max(self.request.num_lost - self.start, 0), self.num_tokens)

    @property
    def scored_ids(self) -> list[int]:
        """The prompt tokens whose log-probabilities the first rows of this chunk give: each row that of the next."""
        request = self.request
        if not request.scores_prompt:
            return []
        return request.token_ids[self.start + 1 : min(self.start + self.num_tokens + 1, request.num_prompt_tokens)]

    def split(self, num_tokens: int) -> tuple[Chunk, Chunk]:
        """Its first `num_tokens` tokens and the others, to be computed one after the other."""
        return (
            Chunk(self.request, self.token_ids[:num_tokens], self.start, sample=False),
            Chunk(self.request, self.token_ids[num_tokens:], self.start + num_tokens, self.sample),
        )


@dataclass(slots=True)
class Batch:
    """The chunks of one step, and how many of their rows serve no request: padding before prompts, and ended rows."""

    chunks: list[Chunk] = field(default_factory=list)
    num_prompt_padding: int = 0
    num_finished_rows: int = 0

    @property
    def num_tokens(self) -> int:
        return sum([len(chunk.token_ids) for chunk in self.chunks])

    @property
    def num_useful_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_padding - self.num_finished_rows

    @property
    def sampled(self) -> list[Chunk]:
        return [chunk for chunk in self.chunks if chunk.sample]

    @property
    def copies(self) -> list[tuple[int, int]]:
        """Blocks to be copied before anything is computed, as (from, to)."""
        return [chunk.copy for chunk in self.chunks if chunk.copy is not None]

    def split(self) -> tuple[Batch, Batch]:
        """Two batches with half of the tokens each, which do together what this one does."""
        first, room = Batch(), self.num_tokens // 2
        rest = list(self.chunks)
        while room:
            chunk = rest.pop(0)
            if chunk.num_tokens > room:
                chunk, other = chunk.split(room)
                rest.insert(0, other)
            first.chunks.append(chunk)
            room -= chunk.num_tokens
        return first, Batch(rest)


@dataclass(slots=True)
class StepOutput:
    """What a step has computed: a token id, or a key of SAMPLING_ERRORS, for each sampled chunk, in order.

    Log-probabilities come for the sampled tokens of requests that want them, and for prompts with the chunks whose rows
    gave them (see `Chunk.scored_ids`).
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[Request, TokenLogprobs]] = field(default_factory=list)
    prompt_logprobs: list[tuple[Chunk, list[TokenLogprobs]]] = field(default_factory=list)

    def __add__(self, later: StepOutput) -> StepOutput:
        return StepOutput(
            self.token_ids + later.token_ids,
            self.logprobs + later.logprobs,
            self.prompt_logprobs + later.prompt_logprobs,
        )
