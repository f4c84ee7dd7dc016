"""Fingerprints: equal for equal values, and for these alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from quorate.replica.fingerprint import fingerprint

VALUES: list[Any] = [
    None, True, 1, 1.0, "1", b"1", [1, 23], [12, 3], (1, 23), [[1], [23]], [], {}, {"a": 1},
    {"b": 1}, {"a": 2}, np.int64(1), np.float32(1), np.arange(3), np.arange(3.0), np.ones(3),
    torch.arange(3), torch.arange(3.0), torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(6),
    torch.tensor(float("nan")), torch.zeros(2, dtype=torch.bfloat16), torch.ones(2).to_sparse(),
    [torch.zeros(1), "a"], [torch.zeros(1), "b"],
]  # fmt: skip


def test_other_values_have_another_fingerprint() -> None:
    found = [fingerprint(value) for value in VALUES]
    twins = [
        (VALUES[i], VALUES[j]) for i in range(len(found)) for j in range(i) if found[i] == found[j]
    ]
    assert not twins
    assert [fingerprint(value) for value in VALUES] == found


def test_the_same_values_have_one_fingerprint_wherever_they_lie() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    assert fingerprint(x.t()) == fingerprint(x.t().contiguous())
    assert fingerprint(x[:, ::2]) == fingerprint(x[:, ::2].clone())
    assert fingerprint(x.requires_grad_()) == fingerprint(x.detach())
    assert fingerprint(np.asfortranarray(np.eye(3))) == fingerprint(np.eye(3))


def test_what_has_no_values_of_its_own_counts_by_type() -> None:
    assert fingerprint({"a": object()}) == fingerprint({"a": object()})
    assert fingerprint({"a": np.array([object()])}) == fingerprint({"a": np.array([object()])})
