"""The folder of a comparison, read again: its results, requests and steps, as they were written."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import UndefinedError

from slipstream_client.errors import SlipstreamError
from slipstream_client.report.changes import baseline_changes

VERSION = 2


def read_folder(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """results, requests and steps of a comparison; no steps where none were read.

    Raises:
        SlipstreamError: the folder holds no results, of another version, or a file that cannot be read.
    """
    results = read_results(folder)
    requests, steps = (_lines(folder / name) for name in ("requests.jsonl", "steps.jsonl"))
    with of_a_comparison(folder):
        _require_requests(results, requests, folder / "requests.jsonl")
    return results, requests, steps


def read_earlier(folder: Path) -> dict[str, Any]:
    """results.json of a folder, which another comparison can be held against.

    Raises:
        SlipstreamError: as of read_results, or a figure is missing or damaged.
    """
    earlier = read_results(folder)
    with of_a_comparison(folder):
        baseline_changes(earlier, earlier)
    return earlier


def read_results(folder: Path) -> dict[str, Any]:
    """results.json of a folder.

    Raises:
        SlipstreamError: there is none, it cannot be read, or it is of another version.
    """
    path = folder / "results.json"
    if not path.is_file():
        raise SlipstreamError(f"{folder} holds no results.json: it is not the folder of a comparison")
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise SlipstreamError(f"{path} cannot be read: {error}") from error
    version = results.get("version") if isinstance(results, dict) else None
    if version != VERSION:
        raise SlipstreamError(f"{path} is of version {version}; this program reads version {VERSION}")
    return results


def _lines(path: Path) -> list[dict[str, Any]]:
    return list(_read_lines(path)) if path.is_file() else []


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise SlipstreamError(f"{path}, line {number}, cannot be read: {error}") from error
            if not isinstance(value, dict):
                raise SlipstreamError(f"{path}, line {number}, is no JSON object")
            yield value


@contextlib.contextmanager
def of_a_comparison(folder: Path) -> Iterator[None]:
    """Let data that no comparison has written, or that was damaged since, fail with the name of its folder.

    Raises:
        SlipstreamError: a field was missing or of another type.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, UndefinedError) as error:
        raise SlipstreamError(
            f"{folder} does not hold what a comparison writes ({type(error).__name__}: {error})"
        ) from error


def _require_requests(results: dict[str, Any], requests: list[dict[str, Any]], path: Path) -> None:
    """Refuse fewer requests than the runs had: percentiles of what is left would look like those of all."""
    measured = Counter(record["run"] for record in requests if record["phase"] == "measured")
    for run in results["runs"]:
        if measured[run["id"]] < run["requests"]:
            raise SlipstreamError(f"{path} has {measured[run['id']]} of the {run['requests']} requests of {run['id']}")
