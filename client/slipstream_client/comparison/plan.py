"""What a comparison runs, and in which order: every variant at every point, again and again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream_client.comparison.slo import Slo
from slipstream_client.comparison.variants import Variant
from slipstream_client.errors import SlipstreamError
from slipstream_client.load.arrivals import Load
from slipstream_client.load.workload import Workload, WorkloadRequest


@dataclass(frozen=True)
class Point:
    """One load that every variant is put under."""

    workload: Workload  # as long as the largest point with it needs
    load: Load
    num_requests: int  # of the workload's first ones, warm-up and cool-down included

    @property
    def requests(self) -> Sequence[WorkloadRequest]:
        return self.workload.requests[: self.num_requests]


@dataclass(frozen=True)
class PlannedRun:
    """One variant at one point."""

    variant: Variant
    point: Point
    repeat: int  # from 0

    @property
    def id(self) -> str:
        return f"{self.variant.name}/{self.point.workload.name}/{self.point.load.label}/{self.repeat + 1}"


@dataclass(frozen=True)
class ComparePlan:
    """What is to be run.

    Attributes:
        baseline: the variant that the others are measured against, by name.
        repeats: of every variant at every point; two or more tell how much the machine itself varies.
        warm_up, cool_down: requests at the beginning and the end of each run that count in no figure.
        retries: further attempts of a request that was refused.
        timeout_s: of one attempt.
        slos: limits that goodput is counted by; the first is the one whose knee is looked for.
    """

    variants: tuple[Variant, ...]
    points: tuple[Point, ...]
    baseline: str
    repeats: int = 1
    warm_up: int = 0
    cool_down: int = 0
    retries: int = 0
    timeout_s: float = 300.0
    seed: int = 0
    slos: tuple[Slo, ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        names = [variant.name for variant in self.variants]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise SlipstreamError(f"the variant {twice!r} is named twice")
        if self.baseline not in names:
            raise SlipstreamError(f"the baseline is {self.baseline!r}; allowed are {', '.join(names)}")
        for point in self.points:
            if point.num_requests <= self.warm_up + self.cool_down:
                raise SlipstreamError(
                    f"{point.num_requests} requests at {point.load.label} are all warm-up ({self.warm_up}) "
                    f"or cool-down ({self.cool_down})"
                )

    def runs(self) -> Iterator[PlannedRun]:
        """In order: point by point, and at each the variants forth, back, forth... (A B B A).

        So what is compared was measured close in time, and a machine that slows down steadily slows both alike.
        """
        for point in self.points:
            for repeat in range(self.repeats):
                order = self.variants if repeat % 2 == 0 else self.variants[::-1]
                for variant in order:
                    yield PlannedRun(variant, point, repeat)

    def workloads(self) -> list[Workload]:
        """Every workload once."""
        return list({id(point.workload): point.workload for point in self.points}.values())

    def describe(self) -> dict[str, Any]:
        """What results.json says about it."""
        return {
            "variants": [variant.describe() for variant in self.variants],
            "baseline": self.baseline,
            "repeats": self.repeats,
            "order": [run.id for run in self.runs()],
            "slo": {slo.name: slo.describe() for slo in self.slos},
            "warm_up": self.warm_up,
            "cool_down": self.cool_down,
            "retries": self.retries,
            "timeout_s": self.timeout_s,
            "seed": self.seed,
        }
