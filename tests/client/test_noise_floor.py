"""The A/A control: noise pooled over repeats, and the floor that follows from it."""

from __future__ import annotations

from math import exp, sqrt

import numpy as np
import pytest

from recorded import samples
from slipstream_client.comparison.noise import MetricNoise, measure_noise, pooled_noise, t_quantile
from slipstream_client.comparison.resampling import resample_points


@pytest.mark.parametrize(
    ("probability", "degrees_of_freedom", "published"),
    [
        (0.975, 1, 12.7062),
        (0.975, 2, 4.3027),
        (0.975, 3, 3.1824),
        (0.975, 4, 2.7764),
        (0.95, 4, 2.1318),
        (0.995, 7, 3.4995),
        (0.975, 10, 2.2281),
        (0.975, 29, 2.0452),
        (0.975, 120, 1.9799),
    ],
)
def test_t_quantiles_are_those_of_the_tables(probability: float, degrees_of_freedom: int, published: float) -> None:
    assert t_quantile(probability, degrees_of_freedom) == pytest.approx(published, abs=6e-5)


def test_noise_is_pooled_around_the_mean_of_each_group() -> None:
    noise = pooled_noise([np.exp([0.0, 0.2]), np.exp([1.0, 1.0, 1.3])])
    assert noise.degrees_of_freedom == 1 + 2
    assert noise.sd_log == pytest.approx(sqrt((0.02 + 0.06) / 3))


def test_groups_that_cannot_be_compared_are_left_out() -> None:
    usable = np.exp([0.0, 0.2])
    assert pooled_noise([usable, np.array([5.0]), np.array([0.0, 1.0]), np.array([np.nan, 1.0])]) == pooled_noise(
        [usable]
    )


def test_the_floor_is_a_prediction_interval_by_students_t() -> None:
    noise = MetricNoise(degrees_of_freedom=4, sd_log=0.03)
    assert noise.floor() == pytest.approx(exp(2.77645 * 0.03 * sqrt(2)) - 1, rel=1e-5)
    assert noise.floor(3, 3) == pytest.approx(exp(2.77645 * 0.03 * sqrt(2 / 3)) - 1, rel=1e-5)
    assert noise.floor(3, 2) == pytest.approx(exp(2.77645 * 0.03 * sqrt(1 / 3 + 1 / 2)) - 1, rel=1e-5)


def test_without_repeats_the_floor_is_unknown() -> None:
    points = resample_points([samples("a", 0, [10, 20]), samples("b", 0, [10, 21])], resamples=10)
    found = measure_noise(points).as_results()
    assert found["runs_compared"] == 0
    assert found["metrics"]["e2e_mean_ms"] == {"floor": None, "degrees_of_freedom": 0}


def test_results_tell_the_floor_of_two_single_runs_and_how_many_runs_it_is_from() -> None:
    runs = [samples("a", 0, [100, 100]), samples("a", 1, [110, 110]), samples("b", 0, [50, 50])]
    found = measure_noise(resample_points(runs, resamples=10)).as_results()
    assert found["runs_compared"] == 2
    floor = exp(12.70620 * np.log(1.1) / sqrt(2) * sqrt(2)) - 1
    assert found["metrics"]["e2e_mean_ms"] == {"floor": pytest.approx(floor, rel=1e-5), "degrees_of_freedom": 1}
    assert found["metrics"]["ttft_mean_ms"] == {"floor": None, "degrees_of_freedom": 0}


def test_two_runs_of_a_variant_differ_by_less_than_the_floor_in_95_of_100_cases() -> None:
    generator = np.random.default_rng(3)
    inside = []
    for _ in range(2000):
        runs = np.exp(0.04 * generator.standard_normal((5, 3)) + np.arange(5)[:, None])
        floor = pooled_noise(list(runs)).floor()
        assert floor is not None
        one, other = np.exp(0.04 * generator.standard_normal(2))
        inside.append(max(one / other, other / one) - 1 < floor)
    assert 0.94 < np.mean(inside) < 0.96
