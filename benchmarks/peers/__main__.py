"""This engine against llama.cpp and transformers: `python -m benchmarks.peers [--parts decode,server] [--json FILE]`.

Both sides of a point run on the same machine with the same number of threads, one after the other, in the opposite
order in every other round. What counts is the ratio within a round, so that what drifts from one to the next cancels;
the tables give its median over the rounds and its spread. The first run builds llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.llama_cpp import VERSION, install
from benchmarks.peers.parts import NAMES, Setting, make_part, needs_llama
from benchmarks.peers.ratios import Found, Part, Point, measure, table
from slipstream.errors import SlipstreamError as EngineError
from slipstream_client.comparison.environment import describe_environment
from slipstream_client.errors import SlipstreamError


def main() -> None:
    """Measure all parts round by round, and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", default=",".join(NAMES), help=f"comma-separated: {', '.join(NAMES)}")
    parser.add_argument("--rounds", type=int, default=5, help="in each of which both sides measure every point")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of either side")
    parser.add_argument("--quick", action="store_true", help="one round of a few points: does it work at all?")
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER", help="of llama.cpp's programs, instead of a build")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where all figures of all rounds go too")
    arguments = parser.parse_args()
    names = arguments.parts.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"--parts: there is no {unknown[0]!r}; there are {', '.join(NAMES)}")
    if arguments.rounds < 1 or arguments.threads < 1:
        parser.error("--rounds and --threads: at least 1")
    rounds = 1 if arguments.quick else arguments.rounds
    try:
        llama = install(arguments.llama_cpp) if any(map(needs_llama, names)) else None
        parts = [make_part(name, Setting(llama, arguments.threads, arguments.quick)) for name in names]
        found = run(parts, rounds)
    except (SlipstreamError, EngineError) as error:
        sys.exit(f"peers: {error}")
    environment = describe_environment() | {"threads": arguments.threads, "rounds": rounds}
    if llama:
        environment["packages"]["llama.cpp"] = VERSION if arguments.llama_cpp is None else "as given"
    tables = [table(part.title, _of(part, found)) for part in parts]
    print("\n".join([_heading(environment), *tables]))
    if arguments.json:
        document = {part.name: [each.describe() for each in _of(part, found)] for part in parts}
        arguments.json.write_text(json.dumps({"version": 1, "environment": environment, "parts": document}, indent=1))


def run(parts: Sequence[Part], rounds: int) -> dict[Point, Found]:
    """Every piece once in every round, so that a point's rounds are spread over the whole time."""
    found = {point: Found(point) for part in parts for piece in part.pieces for point in piece.points}
    for number in range(rounds):
        for part in parts:
            for piece in part.pieces:
                measure(piece, number, found)
                for point in piece.points:
                    print(f"round {number + 1} of {rounds}, {part.name}: {found[point].newest()}", file=sys.stderr)
    return found


def _of(part: Part, found: dict[Point, Found]) -> list[Found]:
    return [found[point] for piece in part.pieces for point in piece.points]


def _heading(environment: dict[str, object]) -> str:
    packages = environment["packages"]
    assert isinstance(packages, dict)
    peers = ("llama.cpp", "torch", "transformers")
    versions = ", ".join(f"{name} {packages[name]}" for name in peers if name in packages)
    return (
        f"{environment['cpu']}, {environment['threads']} threads on {environment['cores']} cores; "
        f"{versions}; {environment['rounds']} rounds; commit {environment['commit'] or 'unknown'}\n"
    )


if __name__ == "__main__":
    main()
