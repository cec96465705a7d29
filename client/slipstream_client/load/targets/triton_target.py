"""What both targets at Triton's HTTP endpoints share: the model's contract, and a request in the model's own terms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from slipstream_client.errors import SlipstreamError
from slipstream_client.load.targets.http_session import HttpSession, parse_object
from slipstream_client.load.targets.target import Attempt
from slipstream_client.tensors import ModelContract

if TYPE_CHECKING:
    from typing_extensions import Self


class TritonTarget:
    """One model, ours or another's that takes `text_input`; its contract is there once the target was entered."""

    endpoint: str

    def __init__(self, url: str, model: str, timeout_s: float | None = None) -> None:
        self.model = model
        self._session = HttpSession(url, timeout_s)
        self._contract: ModelContract

    @property
    def ours(self) -> bool:
        """One of Slipstream's own: it takes our sampling parameters, and counts the tokens of every response."""
        return "policy" in self._contract.parameters

    def describe(self) -> dict[str, Any]:
        """With how the length of an answer is controlled."""
        length = "stop_length" if self.ours else "max_tokens = stop_length; ignore_eos where the model takes it"
        return {"target": self.endpoint, "url": self._session.url, "model": self.model, "length_control": length}

    async def __aenter__(self) -> Self:
        try:
            async with self._session.exchange("GET", self._path("config")) as response:
                self._contract = ModelContract.of_json(parse_object(await response.read()))
            if problem := self._problem():
                raise SlipstreamError(f"model {self.model} {problem}")
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def _problem(self) -> str | None:
        """Why the model cannot be asked in this way."""
        return None if "text_input" in self._contract.inputs else "has no input text_input"

    def _path(self, verb: str) -> str:
        return f"/v2/models/{quote(self.model, safe='')}/{verb}"

    def _body(self, attempt: Attempt, *, stream: bool) -> dict[str, Any]:
        """Inputs by name. Ours end an answer by `stop_length`; another's `max_tokens` is its length."""
        text, stop_length = attempt.request.text, attempt.request.stop_length
        if self.ours:
            return self._contract.json_body(text, None, attempt.sampling(), stream=stream)
        length = stop_length or attempt.request.max_tokens
        if "sampling_parameters" in self._contract.inputs:  # as vLLM's backend has it
            sampling = {"temperature": 0, "max_tokens": length, "ignore_eos": bool(stop_length)}
            return self._contract.json_body(text, None, sampling, stream=stream)
        body = {"text_input": text, "max_tokens": length, "stream": stream}
        return {name: value for name, value in body.items() if name in self._contract.inputs}
