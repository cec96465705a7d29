"""A request as the engine sees it: token ids, counters, blocks and times. It has no phase; everything is derived."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISH_CANCELLED = "cancelled"
FINISH_TIMEOUT = "timeout"
FINISH_ERROR = "error"

# How a request that ended with an error is to be answered; the doors map these to Triton's codes.
INVALID = "invalid"
UNAVAILABLE = "unavailable"
CANCELLED = "cancelled"
INTERNAL = "internal"

# In the place of a token id, where none could be chosen.
NOT_FINITE = -1
NOTHING_ALLOWED = -2
SAMPLING_FAILED = -3
SAMPLING_ERRORS = {
    NOT_FINITE: "the model's logits were not finite",
    NOTHING_ALLOWED: "the request's parameters allow no token at all",
    SAMPLING_FAILED: "no token could be chosen with the request's parameters (see the engine's log)",
}

MOST_LOGPROBS = 20  # of the likeliest tokens beside one; vLLM's and OpenAI's limit


class SamplingParams(msgspec.Struct, frozen=True):
    """How tokens are chosen and when a sequence ends; ranges are validated at the door.

    `bad_sequences` are token sequences that the answer must not contain. `stop_length` ends the sequence at that many
    output tokens exactly as an end-of-sequence token would, also with `ignore_eos`; only the stop check after sampling
    reads it, never a scheduler. `n` answers are sampled, which differ by their choice index. `logprobs` and
    `prompt_logprobs` are how many of the likeliest tokens are reported beside each token; None reports nothing.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop_length: int = 0
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def edits_logits(self) -> bool:
        """Whether the logits are changed before a token is chosen (see `edit_logits`)."""
        return bool(
            self.penalises or self.logit_bias or self.allowed_token_ids or self.bad_sequences or self.min_tokens
        )

    @property
    def greedy(self) -> bool:
        """A temperature below 1e-5 is greedy: the softmax of any two different fp32 logits is one-hot there."""
        return self.temperature < 1e-5


class TokenLogprobs(msgspec.Struct, array_like=True):
    """How likely a token was, by the model's own distribution: before temperature, penalties, and what is cut off.

    `ids` are the token itself and then the likeliest ones, it perhaps among them; `values` are their natural logarithms
    of probability, both [1 + wanted]. `rank` is the token's own, 1 for the likeliest.
    """

    ids: list[int]
    values: list[float]
    rank: int


Lacking = Literal["seats", "blocks", "budget", "priority"]


class Waited(msgspec.Struct):
    """In how many steps a request got nothing, by what it lacked; `priority`: it was behind one that came later."""

    seats: int = 0
    blocks: int = 0
    budget: int = 0
    priority: int = 0

    def count(self, lacking: Lacking) -> None:
        setattr(self, lacking, getattr(self, lacking) + 1)


class Request:
    """One sequence: a prompt and what has been generated for it.

    Attributes:
        key: unique while the request lives; chosen by who submits it.
        token_ids: the prompt, then the output.
        num_computed: tokens whose keys and values lie in the cache, from the first on.
        num_lost: tokens that had been computed when it was last preempted.
        num_cached: tokens that were found in the prefix cache when it was first admitted.
        deadline: when it must have ended, on the engine's clock.
        cache_salt: only requests with the same salt share cached blocks.
        priority, tenant: what queue orders of these names go by (see `queue_order`).
        rank: its place among those that wait, set when it first comes to the queue.
        num_passed: requests that were admitted before it while it was first in the queue.
        cache_link, num_offered_blocks: how far the prefix cache knows its blocks (see `PrefixCache`).
        stream: whether each step's tokens are reported, or all at the end.
        num_reported: output tokens that were reported.
        choice: its index among the answers to one prompt (n > 1).
        first: the choice of index 0, for the others; its prompt is theirs.
        logprobs: one for each output token, where wanted.
        prompt_logprobs: one for each prompt token after the first, where wanted.
        padding: left padding before the first token, in cache slots (lock-step batches only).
        block_table: the blocks that hold them, append-only while it runs.
        end_token_ids: tokens that end it: those it names, and the model's own unless it ignores them.
        edits_logits: whether its sampling does so, asked once.
        error, error_kind: what went wrong, where `finish_reason` is `error`, and how that is answered.
    """

    __slots__ = (
        "arrival_time",
        "block_table",
        "cache_link",
        "cache_salt",
        "choice",
        "deadline",
        "edits_logits",
        "end_token_ids",
        "error",
        "error_kind",
        "finish_reason",
        "finish_time",
        "first",
        "first_scheduled_time",
        "first_token_time",
        "key",
        "last_token_time",
        "logprobs",
        "num_cached",
        "num_computed",
        "num_lost",
        "num_offered_blocks",
        "num_passed",
        "num_preemptions",
        "num_prompt_tokens",
        "num_reported",
        "padding",
        "priority",
        "prompt_logprobs",
        "rank",
        "sampling",
        "stream",
        "tenant",
        "token_ids",
        "waited",
    )

    def __init__(
        self,
        key: tuple[bytes, int],
        prompt_ids: list[int],
        sampling: SamplingParams,
        arrival_time: float,
        stream: bool = True,
        cache_salt: str = "",
        deadline: float = math.inf,
        priority: int = 0,
        tenant: str = "",
    ) -> None:
        self.key = key
        self.stream = stream
        self.num_reported = 0
        self.choice = 0
        self.first: Request | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.token_ids = list(prompt_ids)
        self.num_prompt_tokens = len(prompt_ids)
        self.sampling = sampling
        self.edits_logits = sampling.edits_logits
        self.end_token_ids = frozenset(sampling.stop_token_ids)
        self.arrival_time = arrival_time
        self.deadline = deadline
        self.priority = priority
        self.tenant = tenant
        self.rank: tuple[float, ...] | None = None
        self.num_passed = 0
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.finish_time: float | None = None
        self.num_computed = 0
        self.num_lost = 0
        self.num_cached = 0
        self.cache_salt = cache_salt
        self.cache_link: int | str = cache_salt
        self.num_offered_blocks = 0
        self.padding = 0
        self.block_table: list[int] = []
        self.num_preemptions = 0
        self.waited = Waited()
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.error_kind = INTERNAL

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def max_total_tokens(self) -> int:
        """The most tokens it may ever have: prompt + max_tokens."""
        return self.num_prompt_tokens + self.sampling.max_tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def started(self) -> bool:
        """Whether anything has been computed for the prompt that it is an answer to."""
        return (self.first or self).first_scheduled_time is not None

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of its prompt are still to come, for which all of its rows are computed."""
        return self.sampling.prompt_logprobs is not None and self.choice == 0 and not self.num_output_tokens

    def fork(self, choice: int) -> Request:
        """Another answer to the same prompt, `choice` >= 1; its key is that many after this one's."""
        door, number = self.key
        other = Request(
            (door, number + choice),
            self.token_ids[: self.num_prompt_tokens],
            self.sampling,
            self.arrival_time,
            self.stream,
            self.cache_salt,
            self.deadline,
            self.priority,
            self.tenant,
        )
        other.choice, other.first = choice, self
        return other

    def know_end_of_sequence(self, eos_token_ids: frozenset[int]) -> None:
        """Learn which tokens end a sequence of this model."""
        if not self.sampling.ignore_eos:
            self.end_token_ids |= eos_token_ids

    def append(self, token_id: int, now: float) -> None:
        """Add a sampled token, or one of `SAMPLING_ERRORS`, and find out whether the sequence ends with it."""
        if token_id < 0:
            self.finish(FINISH_ERROR, now, SAMPLING_ERRORS[token_id])
            return
        if self.first_token_time is None:
            self.first_token_time = now
        self.last_token_time = now
        self.token_ids.append(token_id)
        length, sampling = self.num_output_tokens, self.sampling
        if token_id in self.end_token_ids or length == sampling.stop_length:
            self.finish(FINISH_STOP, now)
        elif length >= sampling.max_tokens:
            self.finish(FINISH_LENGTH, now)

    def finish(self, reason: str, now: float, error: str | None = None, error_kind: str = INTERNAL) -> None:
        self.finish_reason = reason
        self.finish_time = now
        self.error, self.error_kind = error, error_kind
