"""How long requests waited for their tokens, counted by size: what a Prometheus histogram is made of."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

# Upper edges of the buckets in seconds: vLLM's, and those of time limits that people set (0.2 s and 2 s to the first
# token, 30 ms between tokens).
FIRST_TOKEN_EDGES = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.25, 0.5, 0.75),
    *(1.0, 2.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
INTER_TOKEN_EDGES = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 40.0),
)
END_TO_END_EDGES = (
    *(0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0),
)


class LatencyCounts(msgspec.Struct, array_like=True):
    """Durations counted by the bucket that they lie in: up to its edge, and not in the one before."""

    counts: list[int]  # [len(edges) + 1], the last for what is beyond all edges
    sum_s: float = 0.0

    @classmethod
    def empty(cls, edges: tuple[float, ...]) -> LatencyCounts:
        return cls([0] * (len(edges) + 1))

    def observe(self, seconds: float, edges: tuple[float, ...]) -> None:
        self.counts[bisect_left(edges, seconds)] += 1
        self.sum_s += seconds
