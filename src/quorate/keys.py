"""Keys: every random stream of a run is a pure function of integers and words.

key("shard", seed, step, shard)      what a shard's forward and backward draw
key("sample", seed, epoch, index)    what a sample's augmentation draws
key("epoch", seed, epoch)            the order of an epoch
"""

from __future__ import annotations

import hashlib


def key(*parts: int | str) -> int:
    """A 64-bit key: equal for equal parts, independent otherwise (BLAKE2b of their text)."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
