"""Values of a ``Shared`` at one time: new ones when something was set, and how they travel."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import quorate
from quorate.replica.beside.values import NO_VALUES, Newest


def test_a_change_makes_new_values_and_the_old_ones_stay() -> None:
    shared = quorate.Shared("a", beta=0.5, mean=torch.ones(3))
    newest = Newest()
    first = newest.look()
    assert newest.look() is first
    shared.beta = 0.25
    second = newest.look()
    assert second.tensors is first.tensors  # no copy for a number
    shared.mean.data.mul_(2)  # counted nowhere
    third = newest.look()
    assert [v.plain["a"]["beta"] for v in (first, second, third)] == [0.5, 0.25, 0.25]
    assert [v.tensors.views["a.mean"][0].item() for v in (first, third)] == [1.0, 2.0]
    assert [v.number for v in (first, second, third)] == [1, 2, 3]


@pytest.mark.parametrize("value", [float("nan"), -0.0, True, 1 << 70, "ü", None])
def test_a_value_is_the_same_until_it_is_another(value: Any) -> None:
    shared = quorate.Shared("a", beta=0.0)
    newest = Newest()
    first = newest.look()
    shared.beta = value
    second = newest.look()
    assert second is not first
    assert newest.look() is second


def test_values_travel_as_json_and_bytes() -> None:
    tensors = {
        "half": torch.randn(3, 2).to(torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "image": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "number": torch.tensor(3.5),
        "none": torch.empty(0, 3),
        "waves": torch.randn(2, dtype=torch.complex64),
    }
    shared = quorate.Shared("a", beta=0.5, **tensors)
    values = Newest().look()
    sent = values.to_json(stored=True)
    assert values.tensors.segment is not None
    there = NO_VALUES.mapped(sent, os.dup(values.tensors.segment.fd))
    again = NO_VALUES.from_json(sent)
    for mine, theirs in zip(again.tensors.vectors, values.tensors.vectors, strict=True):
        mine.copy_(theirs)
    for each in (there, again):
        assert each.plain == {"a": {"beta": 0.5}}
        for key, tensor in tensors.items():
            got = each.tensors.views[f"a.{key}"]
            assert got.dtype == tensor.dtype
            assert torch.equal(got, tensor)
            assert got.stride() == tensor.stride()
    del shared
