"""Counter-based noise: the published generator, one uniform number for each (seed, choice, output index)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.noise import philox4x32, uniform

# philox4x32 with 10 rounds, from the file kat_vectors of the Random123 distribution: counter, key, output.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[np.ndarray]:
    return [np.array([int(word, 16)], np.uint64) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter: str, key: str, output: str) -> None:
    assert philox4x32(words(counter), words(key)) == words(output)


def test_the_vectorised_generator_gives_each_column_its_own_answer() -> None:
    columns = [np.concatenate(parts) for parts in zip(*(words(f"{c} {k}") for c, k, _ in KNOWN_ANSWERS), strict=True)]
    results = philox4x32(columns[:4], columns[4:])
    for column, (_, _, output) in enumerate(KNOWN_ANSWERS):
        assert [int(word[column]) for word in results] == [int(word[0]) for word in words(output)]


def draw(*triples: tuple[int, int, int]) -> list[float]:
    seeds, choices, indices = (np.array(column, np.uint64) for column in zip(*triples, strict=True))
    return uniform(seeds, choices, indices).tolist()


def test_the_number_is_the_first_53_bits_of_the_known_answer() -> None:
    assert draw((0, 0, 0)) == [((0x6627E8D5 << 21) ^ (0xE169C58D >> 11)) / 2**53]


triples = st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))


@given(st.lists(triples, min_size=2, max_size=8, unique=True))
def test_a_number_depends_on_its_own_triple_alone(drawn: list[tuple[int, int, int]]) -> None:
    together = draw(*drawn)
    assert together == [draw(triple)[0] for triple in drawn]
    assert all(0.0 <= number < 1.0 for number in together)
    assert len(set(together)) == len(together)


def test_every_word_of_the_seed_and_the_counter_matters() -> None:
    numbers = draw((1, 0, 0), (2, 0, 0), (1 + (1 << 32), 0, 0), (1, 1, 0), (1, 0, 1))
    assert len(set(numbers)) == 5


def test_the_numbers_are_spread_evenly() -> None:
    """Counts in 100 equal bins of 100,000 numbers; the 99.9th percentile of chi-square with 99 degrees is 148.2."""
    count = 100_000
    for seeds, indices in ((np.full(count, 7), np.arange(count)), (np.arange(count), np.full(count, 7))):
        numbers = uniform(seeds.astype(np.uint64), np.zeros(count, np.uint64), indices.astype(np.uint64))
        counts = np.histogram(numbers, bins=100, range=(0.0, 1.0))[0]
        assert ((counts - count / 100) ** 2 / (count / 100)).sum() < 148.2
