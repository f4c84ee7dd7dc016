"""A fingerprint of a batch, to compare whether two processes have loaded the same rows.

A worker runs the script again, and a script may make different data each time: from an unseeded
generator, or from the order of a set of strings, which differs between Python processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from quorate.replica.digest import content
from quorate.replica.nested import parts


def fingerprint(batch: Any) -> str:
    """Return a hash over all tensors, arrays, numbers and strings in a batch, nested.

    Objects are hashed by their attributes. All further values are hashed by type only.
    """
    hashed = hashlib.blake2b(digest_size=16)
    _feed(hashed, batch)
    return hashed.hexdigest()


def _feed(hashed: hashlib.blake2b, value: Any) -> None:
    # Values are preceded by their types, so [1, 23] differs from [12, 3].
    hashed.update(f"{type(value).__name__};".encode())
    if isinstance(value, torch.Tensor):
        hashed.update(f"{value.dtype} {tuple(value.shape)};".encode())
        hashed.update(content(value).data)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        hashed.update(f"{value.dtype} {value.shape};".encode())
        hashed.update(np.ascontiguousarray(value).tobytes())
    elif (inner := parts(value)) is not None:
        hashed.update(f"{len(value)};".encode())
        for name, part in inner:
            if isinstance(value, Mapping):
                _feed(hashed, name)
            _feed(hashed, part)
    elif isinstance(value, (set, frozenset)):
        _feed(hashed, sorted(fingerprint(part) for part in value))
    elif isinstance(value, np.ndarray):
        _feed(hashed, value.tolist())
    elif isinstance(value, (str, bytes, int, float, complex, bool, np.generic, type(None))):
        hashed.update(f"{value!r};".encode())
    elif hasattr(value, "__dict__"):
        _feed(hashed, vars(value))
