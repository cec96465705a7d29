"""The output file: one whole line a request, written at once; locked, and mended where a line was cut short.

Answers are appended as they come, so their order is that of completion. A process that was killed, or a full disk, may
leave the beginning of a line behind; the next one cuts it off, and the request counts as not answered.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream_client.errors import SlipstreamError
from slipstream_client.offline.answers import read_answer

_BEGINNING = b'{"id": "'  # of every line, also of a log


@dataclass(frozen=True, slots=True)
class Answered:
    """What a line of the output says."""

    digest: str
    error_code: str | None


class AppendedFile:
    """A file that grows by whole lines, each by one call of the system."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise SlipstreamError(f"cannot write to {path}: {error.strerror}") from error

    def append(self, line: dict[str, Any]) -> None:
        """Write one line; where not all of it can be, nothing of it stays.

        Raises:
            SlipstreamError: the disk is full, or fails.
        """
        content = json.dumps(line).encode() + b"\n"
        size = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, content)
            if written < len(content):
                raise OSError(0, "no space for a whole line")
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, size)
            raise SlipstreamError(f"cannot write to {self.path}: {error.strerror}") from error

    def close(self) -> None:
        os.close(self._descriptor)

    def lines(self) -> Iterator[bytes]:
        """All lines from the first; the last may lack its end."""
        with self.path.open("rb") as file:
            yield from file

    def mend(self, tail: bytes, whole: bool) -> None:
        """Cut off a last line without an end, or end it where it is whole or not one of ours."""
        if whole or not tail.startswith(_BEGINNING[: len(tail)]):
            os.write(self._descriptor, b"\n")
        else:
            os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - len(tail))


class OutputFile(AppendedFile):
    """Answers by request id; one process at a time."""

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_file():
            raise SlipstreamError(f"{path} is no file")
        super().__init__(path)
        self._replaced: list[int] = []  # descriptors whose locks keep out who has opened the file before
        try:
            _lock(self._descriptor, path)
        except BaseException:
            os.close(self._descriptor)
            raise

    def read(self) -> dict[str, Answered]:
        """Who is answered already. A line that was cut short at the end is cut off.

        Raises:
            SlipstreamError: the file is no output of a batch, or answers a request twice.
        """
        answered: dict[str, Answered] = {}
        for number, line in enumerate(self.lines(), start=1):
            whole = line.endswith(b"\n")
            try:
                id_, digest, error_code = read_answer(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError):
                if whole or not line.startswith(_BEGINNING[: len(line)]):
                    raise SlipstreamError(f"{self.path}:{number} is no line of a batch's output") from None
                self.mend(line, whole=False)
                break  # what is read on would be the mending
            if id_ in answered:
                raise SlipstreamError(f"{self.path}:{number} answers {id_!r} a second time")
            answered[id_] = Answered(digest, error_code)
            if not whole:
                self.mend(line, whole=True)
                break
        return answered

    def drop(self, ids: set[str]) -> None:
        """Take the lines of these requests out, so that they can be answered anew; all at once or not at all."""
        new_path = self.path.with_name(f".{self.path.name}.new")
        new = os.open(new_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        try:
            fcntl.flock(new, fcntl.LOCK_EX)
            with os.fdopen(os.dup(new), "wb") as file:
                file.writelines(line for line in self.lines() if read_answer(json.loads(line))[0] not in ids)
                file.flush()
                os.fsync(new)
            os.replace(new_path, self.path)
        except OSError as error:
            os.close(new)
            new_path.unlink(missing_ok=True)
            raise SlipstreamError(f"cannot write to {new_path}: {error.strerror}") from error
        self._replaced.append(self._descriptor)
        self._descriptor = new

    def close(self) -> None:
        with contextlib.suppress(OSError):  # not every file system can
            os.fsync(self._descriptor)
        super().close()
        for descriptor in self._replaced:
            os.close(descriptor)


class RequestLog(AppendedFile):
    """A line for each attempt; what a process that was killed has left of its last line is cut off."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        for line in self.lines() if path.is_file() else ():  # a pipe or a terminal has no end to read to
            if not line.endswith(b"\n"):
                self.mend(line, whole=False)
                break


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise SlipstreamError(f"another batch writes to {path}") from error
    if os.fstat(descriptor).st_ino != path.stat().st_ino:  # it was replaced since it was opened, see `drop`
        raise SlipstreamError(f"another batch has just written to {path}; try again")
