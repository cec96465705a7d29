"""Counter-based randomness: a uniform number that depends on (seed, choice, output index) and on nothing else."""

from __future__ import annotations

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def uniform(seeds: np.ndarray, choices: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each (seed, choice, output index), by Philox4x32-10 (Salmon et al., SC 2011).

    Args:
        seeds: [n] uint64, the key.
        choices, indices: [n] below 2^32, two words of the counter.

    Returns:
        [n] float64 with 53 random bits.
    """
    keys = [seeds.astype(np.uint64) & _LOW, seeds.astype(np.uint64) >> _SHIFT]
    zero = np.zeros(len(seeds), np.uint64)
    words = philox4x32([indices.astype(np.uint64), choices.astype(np.uint64), zero, zero.copy()], keys)
    bits = (words[0] << np.uint64(21)) ^ (words[1] >> np.uint64(11))
    return bits.astype(np.float64) * 2.0**-53


def philox4x32(counter: list[np.ndarray], key: list[np.ndarray]) -> list[np.ndarray]:
    """Ten rounds of Philox on four counter words and two key words, each [n] uint64 below 2^32."""
    for _ in range(10):
        first = counter[0] * _MULTIPLIERS[0]
        second = counter[2] * _MULTIPLIERS[1]
        counter = [
            (second >> _SHIFT) ^ counter[1] ^ key[0],
            second & _LOW,
            (first >> _SHIFT) ^ counter[3] ^ key[1],
            first & _LOW,
        ]
        key = [(word + step) & _LOW for word, step in zip(key, _KEY_STEPS, strict=True)]
    return counter
