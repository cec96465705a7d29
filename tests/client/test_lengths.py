"""Distributions of lengths: their means by hand, and that what is drawn follows them."""

from __future__ import annotations

import json
from importlib import resources

import numpy as np
import pytest

from slipstream_client.load.lengths import Constant, Lengths, LogNormal, QuantileTable
from slipstream_client.load.named_workloads import MIXED_INPUT, MIXED_OUTPUT, population

DRAWN = 200_000
PUBLISHED = json.loads(resources.files("slipstream_client.load").joinpath("lengths.json").read_text())
TRACES = ["azure-conv", "azure-code", "arxiv-summarization", "mooncake-conv"]


class Uniform:
    """A generator whose uniform numbers are given."""

    def __init__(self, *numbers: float) -> None:
        self._numbers = np.array(numbers)

    def random(self, count: int) -> np.ndarray:
        return self._numbers[:count]


def test_a_table_is_linear_between_its_percentiles() -> None:
    table = QuantileTable((0, 50, 90, 100), (2, 4, 12, 100), 9.5)
    drawn = table.sample(Uniform(0, 0.25, 0.5, 0.7, 0.9, 0.95, 1), 7)  # type: ignore[arg-type]
    assert drawn.tolist() == [2, 3, 4, 8, 12, 56, 100]
    assert table.expected == pytest.approx(0.5 * 3 + 0.4 * 8 + 0.1 * 56)
    assert table.high == 100
    assert str(table) == "percentiles of a trace, 2..100, mean 10.3 (the trace's own: 9.5)"


@pytest.mark.parametrize(("side", "column"), [("input", 0), ("output", 1)])
@pytest.mark.parametrize("name", TRACES)
def test_what_is_drawn_has_the_percentiles_of_the_trace(name: str, side: str, column: int) -> None:
    trace = PUBLISHED["traces"][name]
    drawn = lengths_of(name)[column].sample(np.random.default_rng(2), DRAWN)
    points = list(zip(PUBLISHED["percentiles"], trace[side], strict=True)) + [
        (float(percentile), tokens) for percentile, tokens in trace["tail"][side].items()
    ]
    for percentile, tokens in points:
        # Several percentiles may have the same length, and lengths are rounded: so from both sides.
        assert np.mean(drawn < tokens) <= percentile / 100 + 0.005
        assert np.mean(drawn <= tokens) >= percentile / 100 - 0.005
    assert trace[side][0] <= drawn.min() <= drawn.max() <= trace[side][-1]


@pytest.mark.parametrize(
    ("name", "implied", "within"),
    # The means of the tables, and how near they are to the traces' own.
    [
        ("azure-conv", (1151.9, 214.0), (0.003, 0.015)),
        ("azure-code", (2075.6, 30.0), (0.015, 0.077)),
        ("arxiv-summarization", (2583.8, 294.0), (0.002, 0.01)),
        ("mooncake-conv", (12443.5, 346.9), (0.035, 0.013)),
    ],
)
def test_the_mean_of_a_table_is_near_that_of_the_trace(
    name: str, implied: tuple[float, float], within: tuple[float, float]
) -> None:
    trace = PUBLISHED["traces"][name]
    for lengths, side, mean, share in zip(lengths_of(name), ("input", "output"), implied, within, strict=True):
        assert lengths.expected == pytest.approx(mean, abs=0.05)
        assert lengths.expected == pytest.approx(trace[f"mean_{side}"], rel=share)
        drawn = lengths.sample(np.random.default_rng(3), DRAWN)
        assert drawn.mean() == pytest.approx(mean, rel=0.01)


@pytest.mark.parametrize(
    ("distribution", "clipped_mean", "median"),
    # Means of the clipped distributions by numerical integration; medians are exp(mu).
    [(MIXED_INPUT, 63.83, 64 * np.exp(-(0.8**2) / 2)), (MIXED_OUTPUT, 47.18, 48 * np.exp(-(1.0**2) / 2))],
)
def test_lengths_follow_the_stated_lognormal(distribution: LogNormal, clipped_mean: float, median: float) -> None:
    drawn = distribution.sample(np.random.default_rng(1), DRAWN)
    assert drawn.min() == distribution.low
    assert drawn.max() == distribution.high
    assert distribution.expected == pytest.approx(clipped_mean, abs=0.005)
    assert drawn.mean() == pytest.approx(clipped_mean, rel=0.01)
    assert np.median(drawn) == pytest.approx(median, rel=0.02)


@pytest.mark.parametrize(
    ("name", "means", "sigmas"),
    [("sharegpt-like", (161.31, 337.99), (1.0, 0.9)), ("alpaca-like", (19.31, 58.45), (0.6, 0.8))],
)
def test_published_lognormals_have_their_own_mean_and_sigma(
    name: str, means: tuple[float, float], sigmas: tuple[float, float]
) -> None:
    for lengths, mean, sigma in zip(lengths_of(name), means, sigmas, strict=True):
        drawn = lengths.sample(np.random.default_rng(4), DRAWN)
        # Clipping at the end takes at most 1.8 % of the mean.
        assert mean * 0.982 <= lengths.expected <= mean
        assert drawn.mean() == pytest.approx(lengths.expected, rel=0.01)
        assert np.median(drawn) == pytest.approx(mean * np.exp(-(sigma**2) / 2), rel=0.02)
        # Between the first and the third quartile, of which clipping touches neither.
        quartiles = np.log(np.percentile(drawn, [25, 75]))
        assert quartiles[1] - quartiles[0] == pytest.approx(2 * 0.67449 * sigma, rel=0.04)


@pytest.mark.parametrize(
    ("sigma", "variation"),
    # Far from the bounds sqrt(exp(sigma^2) - 1); near them less. The rest by simulation.
    [(0.25, np.sqrt(np.exp(0.25**2) - 1)), (0.5, np.sqrt(np.exp(0.5**2) - 1)), (1, 1.16), (2, 1.83), (3, 2.08)],
)
def test_variance_keeps_the_means_of_equal_and_widens_the_spread(sigma: float, variation: float) -> None:
    for lengths, mean in zip(lengths_of(f"variance:{sigma}"), (64, 48), strict=True):
        drawn = lengths.sample(np.random.default_rng(5), 4 * DRAWN)
        assert lengths.expected == pytest.approx(mean, rel=1e-9)
        assert drawn.mean() == pytest.approx(mean, rel=0.005)
        assert drawn.std() / drawn.mean() == pytest.approx(variation, rel=0.03)


def test_lognormal_without_spread_is_constant() -> None:
    assert LogNormal(64, 0, 8, 512).sample(np.random.default_rng(0), 5).tolist() == [64] * 5
    assert LogNormal(64, 0, 8, 512).expected == 64
    assert LogNormal(1000, 0, 8, 512).expected == 512
    assert Constant(7).sample(np.random.default_rng(0), 3).tolist() == [7, 7, 7]


def test_the_mean_of_a_lognormal_counts_rounding() -> None:
    # Of 1, 2 and 3: at least 2 where the logarithm is above ln 1.5, at least 3 above ln 2.5; mu is 0.5, sigma 1.
    narrow = LogNormal(np.e, 1, 1, 3)
    assert narrow.mu == pytest.approx(0.5)
    assert narrow.expected == pytest.approx(1 + 0.53766 + 0.33860, abs=1e-4)


def test_distributions_say_in_words_what_clipping_does() -> None:
    assert str(MIXED_OUTPUT) == "lognormal, mean 48, sigma 1, clipped to 4..384 (mean then 47.2)"
    assert str(Constant(7)) == "always 7"


def lengths_of(name: str) -> tuple[Lengths, Lengths]:
    """Input and output."""
    drawn_from = population(name)
    return drawn_from.inputs, drawn_from.outputs
