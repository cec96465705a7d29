"""Any server with OpenAI's API: `/v1/completions`, streamed, so that other engines can stand in the same table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slipstream_client.http_client import CODE_OF_STATUS
from slipstream_client.load.targets.http_session import HttpSession, parse_object, read_events
from slipstream_client.load.targets.target import Attempt
from slipstream_client.load.targets.token_counts import from_totals
from slipstream_client.tensors import RequestFailed

if TYPE_CHECKING:
    from typing_extensions import Self

_END = b"[DONE]"


class OpenAiTarget:
    """Tokens are counted by the server's `usage`, with each chunk where it has that, else shared out of the whole.

    Of a server that gives no usage each chunk with text is one token. `stats["token_counts"]` says which it was.
    """

    streams = True
    batch_size = None

    def __init__(self, url: str, model: str, timeout_s: float | None = None, *, keeps_connections: bool = True) -> None:
        self.model = model
        self._session = HttpSession(url.rstrip("/").removesuffix("/v1"), timeout_s, keeps_connections=keeps_connections)

    async def send(self, attempts: Sequence[Attempt]) -> None:
        (attempt,) = attempts
        answer = _Answer()
        ended = False
        try:
            async with self._session.exchange("POST", "/v1/completions", self._body(attempt)) as response:
                async for at, data in read_events(response):
                    if data == _END:
                        ended = True
                    elif not ended:
                        answer.add(at, parse_object(data))
        finally:
            answer.note(attempt)
        if not ended:
            raise RequestFailed("the server closed the stream before [DONE]", "UNAVAILABLE")

    def describe(self) -> dict[str, Any]:
        return {
            "target": "openai",
            "url": self._session.url,
            "model": self.model,
            "length_control": "max_tokens = stop_length, ignore_eos",
            "cache": "cache_salt of the run; a server that does not know it may have a prompt of an earlier run cached",
        }

    async def __aenter__(self) -> Self:
        try:
            async with self._session.exchange("GET", "/v1/models") as response:
                await response.read()
        except RequestFailed as error:
            # Not every server lists its models; one that is not there answers nothing.
            if error.code == "UNAVAILABLE":
                await self._session.close()
                raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def _body(self, attempt: Attempt) -> dict[str, Any]:
        request = attempt.request
        return {
            "model": self.model,
            "prompt": request.text,
            "max_tokens": request.stop_length or request.max_tokens,
            "temperature": 0,
            "ignore_eos": bool(request.stop_length),
            "cache_salt": attempt.cache_salt,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }


class _Answer:
    """The chunks of one attempt as they came; the tokens of each are known only when all of them are."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._texts: list[str] = []
        self._totals: list[int | None] = []
        self._input_tokens: int | None = None
        self._finish_reason: str | None = None

    def add(self, at: float, event: Mapping[str, Any]) -> None:
        if "error" in event or event.get("object") == "error":
            raise _failure(event.get("error") or event)
        choice: Mapping[str, Any] = next(iter(event.get("choices") or ()), {})
        usage = event.get("usage") or {}
        self._times.append(at)
        self._texts.append(choice.get("text") or "")
        self._totals.append(usage.get("completion_tokens"))
        self._input_tokens = usage.get("prompt_tokens", self._input_tokens)
        self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def note(self, attempt: Attempt) -> None:
        """What has come, also where the attempt fails."""
        tokens = from_totals(self._texts, self._totals)
        attempt.chunks = list(zip(self._times, tokens, strict=True))
        attempt.input_tokens, attempt.finish_reason = self._input_tokens, self._finish_reason
        attempt.stats = {"token_counts": self._counted_by()} if attempt.chunks else None

    def _counted_by(self) -> str:
        totals = [total for total in self._totals if total is not None]
        if not totals:
            return "chunks with text"
        uncounted = sum(bool(text) and total is None for text, total in zip(self._texts, self._totals, strict=True))
        return "usage of the whole" if uncounted else "usage of each chunk"


def _failure(error: Any) -> RequestFailed:
    """Servers say it as an object with a message and a status, or as a text."""
    if not isinstance(error, Mapping):
        return RequestFailed(str(error))
    status: Any = error.get("code")
    return RequestFailed(str(error.get("message") or error), CODE_OF_STATUS.get(status, "UNKNOWN"))
