"""A fingerprint of a batch: whether two processes have loaded the same rows.

A worker runs the script again, and a script may make other data each time: from an unseeded
generator, or from the order of a set of strings, which differs between Python processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def fingerprint(batch: Any) -> str:
    """A hash over the values of all tensors, arrays, numbers and strings in it, nested.

    Of objects the attributes count. A value that is none of these counts by its type only.
    """
    found = hashlib.blake2b(digest_size=16)
    _feed(found, batch)
    return found.hexdigest()


def _feed(found: hashlib.blake2b, value: Any) -> None:
    # Each value is preceded by its type, so that [1, 23] is not [12, 3].
    found.update(f"{type(value).__name__};".encode())
    if isinstance(value, torch.Tensor):
        dense = (value.to_dense() if value.layout is not torch.strided else value).detach()
        found.update(f"{value.dtype} {tuple(value.shape)};".encode())
        found.update(dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        found.update(f"{value.dtype} {value.shape};".encode())
        found.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        for name, part in value.items():
            _feed(found, name)
            _feed(found, part)
    elif isinstance(value, (list, tuple)):
        found.update(f"{len(value)};".encode())
        for part in value:
            _feed(found, part)
    elif isinstance(value, (set, frozenset)):
        _feed(found, sorted(fingerprint(part) for part in value))
    elif isinstance(value, np.ndarray):
        _feed(found, value.tolist())
    elif isinstance(value, (str, bytes, int, float, complex, bool, np.generic, type(None))):
        found.update(f"{value!r};".encode())
    elif hasattr(value, "__dict__"):
        _feed(found, vars(value))
