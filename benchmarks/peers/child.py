"""A measurement in a process of its own, so that neither side's idle threads or memory are there for the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.ratios import Unavailable

_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 1800.0


def run_program(command: Sequence[str]) -> str:
    """What a program writes to its standard output.

    Raises:
        RuntimeError: it failed; with the end of what it wrote to standard error.
    """
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, cwd=_ROOT, env=environment)
    if ended.returncode:
        said = ended.stderr[-2000:] or ended.stdout[-2000:]
        raise RuntimeError(f"{Path(command[0]).name} ended with {ended.returncode}:\n{said}")
    return ended.stdout


def run_module(name: str, *arguments: str) -> dict[str, Any]:
    """The object that `python -m benchmarks.peers.<name>` has printed as its last line; see `report`.

    Raises:
        Unavailable: it says that this cannot be done here.
        RuntimeError: it failed.
    """
    said = run_program([sys.executable, "-m", f"benchmarks.peers.{name}", *arguments])
    answer = json.loads(said.splitlines()[-1])
    if "unavailable" in answer:
        raise Unavailable(answer["unavailable"])
    return dict(answer)


def report(answer: dict[str, Any]) -> None:
    """Say the result to the process that has started this one."""
    print(json.dumps(answer), flush=True)
