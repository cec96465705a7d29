"""The input file: checked as a whole before anything is sent, then read again line by line as requests are sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slipstream_client.errors import SlipstreamError
from slipstream_client.offline.fields import BadField
from slipstream_client.offline.lines import BatchRequest, parse_line
from slipstream_client.tensors import ModelContract

_FAULTS_SHOWN = 10


class BadInput(SlipstreamError):
    """The input cannot be sent; `faults` says where and why, a line each."""

    def __init__(self, path: Path, faults: list[str], number: int) -> None:
        super().__init__(f"{path} was not sent: {number} of its lines cannot be (listed above)")
        self.faults = faults


@dataclass
class InputFile:
    """What is kept of the whole file: who is in it, and what stands for each request; never the requests."""

    path: Path
    max_tokens: int | None = None  # for requests that do not say how many
    digests: dict[str, str] = field(default_factory=dict)  # by id, in the order of the file
    _first_use: dict[str, int] = field(default_factory=dict)  # of what only some models take: its first line

    @classmethod
    def checked(cls, path: Path, max_tokens: int | None = None) -> InputFile:
        """Read it to its end.

        Raises:
            BadInput: lines are no requests, or two have one id.
        """
        if not path.is_file():
            raise SlipstreamError(f"{path} is no file: the input is read twice")
        checked = cls(path, max_tokens)
        faults: list[str] = []
        number = 0
        lines: dict[str, int] = {}
        for line, text in checked._lines():
            try:
                request = parse_line(text, line, max_tokens)
                if request.id in lines:
                    raise BadField(f"id {request.id!r} stands in line {lines[request.id]} already")
            except BadField as error:
                number += 1
                if number <= _FAULTS_SHOWN:
                    faults.append(f"{path}:{line}: {error}")
                continue
            lines[request.id] = line
            checked.digests[request.id] = request.digest
            for name in request.continuous_only:
                checked._first_use.setdefault(name, line)
        if number:
            raise BadInput(path, faults, number)
        return checked

    def check_for(self, contract: ModelContract) -> None:
        """Raise SlipstreamError if a request asks for what the model does not have."""
        if "input_ids" in contract.inputs or not self._first_use:
            return
        name, line = min(self._first_use.items(), key=lambda use: use[1])
        raise SlipstreamError(
            f"{self.path}:{line}: {name} is not taken by {contract.name}; allowed is a prompt of text without "
            f"{', '.join(sorted(self._first_use))} (continuous and continuous_unary take them)"
        )

    def requests_without(self, answered: Mapping[str, object]) -> Iterator[BatchRequest]:
        """The requests that are not answered, in the order of the file.

        Raises:
            SlipstreamError: the file has changed since it was checked.
        """
        for line, text in self._lines():
            try:
                request = parse_line(text, line, self.max_tokens)
            except BadField:
                request = None
            if request is None or self.digests.get(request.id) != request.digest:
                raise SlipstreamError(f"{self.path}:{line} has changed since it was checked")
            if request.id not in answered:
                yield request

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Number and text of every line that is not blank."""
        with self.path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                content = text.removeprefix(b"\xef\xbb\xbf") if number == 1 else text
                if content.strip():
                    yield number, content
