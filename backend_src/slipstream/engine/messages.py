"""What doors and engines say to each other, as msgpack over a Unix-domain socket: one message per step and door."""

from __future__ import annotations

import msgspec

from slipstream.engine.latencies import (
    END_TO_END_EDGES,
    FIRST_TOKEN_EDGES,
    INTER_TOKEN_EDGES,
    LatencyCounts,
)
from slipstream.engine.request import FINISH_CANCELLED, Request, SamplingParams, TokenLogprobs, Waited


class NewRequest(msgspec.Struct):
    """One request. `id` is the door's own, and so are the next ones of further choices (n > 1), which are answered like
    requests of their own; `arrival_time` is its monotonic clock, which is the machine's."""

    id: int
    prompt_ids: list[int]
    sampling: SamplingParams
    arrival_time: float
    stream: bool
    cache_salt: str = ""
    timeout_s: float | None = None  # from its arrival on; None is as long as the engine allows
    priority: int = 0
    tenant: str = ""


class Submit(msgspec.Struct, tag=True):
    """Queue `requests` together; a lock-step engine makes them one group where they fit.

    `advance` names sequences of an iterative engine that are to get one more token in the same step.
    """

    requests: list[NewRequest]
    advance: list[int] = []


class Cancel(msgspec.Struct, tag=True):
    """End these; unknown ids have ended already. Their finish reason says whether their door has all it wants."""

    ids: list[int]
    reason: str = FINISH_CANCELLED  # or FINISH_STOP


class Leave(msgspec.Struct, tag=True):
    """The door's last word; the engine answers it with the last update."""


Command = Submit | Cancel | Leave


class RequestStats(msgspec.Struct):
    """How a request fared, in seconds and counts; sent once, with its end. `arrival_s` is on the server's clock."""

    arrival_s: float
    queue_s: float
    first_token_s: float | None
    inference_s: float
    num_cached: int
    num_preemptions: int
    waited: Waited

    @property
    def end_s(self) -> float:
        """When its last token came, on the server's clock."""
        return self.arrival_s + self.queue_s + self.inference_s

    @classmethod
    def of(cls, request: Request) -> RequestStats:
        end = request.finish_time if request.finish_time is not None else request.arrival_time
        scheduled = request.first_scheduled_time if request.first_scheduled_time is not None else end
        first_token = request.first_token_time
        return cls(
            arrival_s=request.arrival_time,
            queue_s=scheduled - request.arrival_time,
            first_token_s=None if first_token is None else first_token - request.arrival_time,
            inference_s=end - scheduled,
            num_cached=request.num_cached,
            num_preemptions=request.num_preemptions,
            waited=request.waited,
        )


class Output(msgspec.Struct, omit_defaults=True):
    """New tokens of one request, with `logprobs` for each where wanted; those of the prompt come with the first.

    `finish_reason` and `stats` come with the last, `error` and `error_kind` with a failure.
    """

    id: int
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    finish_reason: str | None = None
    error: str | None = None
    error_kind: str | None = None
    stats: RequestStats | None = None

    @classmethod
    def news_of(cls, request: Request) -> Output:
        """What has not been reported of a request yet; reported herewith."""
        reported, request.num_reported = request.num_reported, request.num_output_tokens
        return cls(
            id=request.key[1],
            token_ids=request.token_ids[request.num_prompt_tokens + reported :],
            logprobs=request.logprobs[reported:],
            prompt_logprobs=[] if reported else request.prompt_logprobs,
            finish_reason=request.finish_reason,
            error=request.error,
            error_kind=request.error_kind if request.error is not None else None,
            stats=RequestStats.of(request) if request.finished else None,
        )


class EngineStats(msgspec.Struct):
    """Gauges of now and counters since the engine's start."""

    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    kv_blocks_total: int = 0
    kv_blocks_peak: int = 0  # since the last publication
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    readmission_queried_tokens: int = 0
    readmission_hit_tokens: int = 0
    steps: int = 0
    useful_tokens: int = 0
    computed_tokens: int = 0
    kv_waste_steps: float = 0.0  # sum over steps of the share of the held KV space that has no token
    finished: dict[str, int] = {}
    refused: dict[str, int] = {}
    first_token: LatencyCounts = msgspec.field(default_factory=lambda: LatencyCounts.empty(FIRST_TOKEN_EDGES))
    inter_token: LatencyCounts = msgspec.field(default_factory=lambda: LatencyCounts.empty(INTER_TOKEN_EDGES))
    end_to_end: LatencyCounts = msgspec.field(default_factory=lambda: LatencyCounts.empty(END_TO_END_EDGES))


class Update(msgspec.Struct):
    """What one step means for one door; `stats` goes to the leading door alone, at a low rate.

    `published` comes with the first stats of a door that takes over the lead: what the one before has published. After
    the `last` update nothing more comes, so a door that leads and leaves has published all that the next relies on.
    """

    outputs: list[Output]
    stats: EngineStats | None = None
    published: EngineStats | None = None
    last: bool = False


class EngineInfo(msgspec.Struct, kw_only=True):
    """What a door learns of its engine when it connects."""

    engine: str
    model: str
    device: str
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    batch_invariant: bool
    pid: int
