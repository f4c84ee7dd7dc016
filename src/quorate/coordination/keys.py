"""Keys: every random stream of a run is a pure function of integers and words.

key("shard", seed, step, shard)      what a shard's forward and backward draw
key("update", seed, n)               what the optimizer draws in update n
key("between", seed, n)              what callbacks and a loop's body draw after update n
key("sample", seed, epoch, index)    what a sample's augmentation draws
key("augment", seed, epoch)          what the augmentation of batches draws, with ``hashes``
key("epoch", seed, epoch)            the order of an epoch, likewise
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

Seed = int | tuple[int | str, ...]  # a key, or the parts of one, which is made if it is wanted


def key(*parts: int | str) -> int:
    """Return a 64-bit key: equal for equal parts, independent otherwise (BLAKE2b of their text)."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def made(seed: Seed) -> int:
    """Return the key of a seed."""
    return key(*seed) if isinstance(seed, tuple) else seed


def hashes(start: int | NDArray[np.uint64], numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each number: random numbers by their number, from a key on.

    Number n is the n-th output, from 0, of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014) whose
    state is ``start``. Nothing but additions, shifts and products of uint64: the same anywhere.

    Args:
        start: a key, or an array of them, which is broadcast against the numbers.
        numbers: at least one dimension.
    """
    state = np.uint64(start) + (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state
