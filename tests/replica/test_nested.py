"""Batches of any structure: what is walked through, and what is left alone."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, deque, namedtuple
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from quorate.replica.compiled import described, signature
from quorate.replica.fingerprint import fingerprint
from quorate.replica.nested import leaves, mapped, mapped_leaves, tensors
from quorate.replica.witness.values import pieces

Pair = namedtuple("Pair", ["left", "right"])
A, B = torch.tensor([1.0, 2.0]), torch.tensor([[3]])

CONTAINERS: dict[str, Any] = {
    "list": [A, B],
    "tuple": (A, B),
    "named tuple": Pair(A, B),
    "dict": {"a": A, "b": B},
    "ordered dict": OrderedDict(a=A, b=B),
    "user dict": UserDict(a=A, b=B),
    "frozen mapping": MappingProxyType({"a": A, "b": B}),
    "deque": deque([A, B]),
    "user list": UserList([A, B]),
    "of torch": torch.return_types.max((A, B)),
    "nested": {"a": [A, "text"], "b": (None, {"c": B})},
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_all_walks_see_the_same_containers(kind: str) -> None:
    batch = CONTAINERS[kind]
    assert all(seen is known for seen, known in zip(tensors(batch), (A, B), strict=True))
    doubled = mapped(batch, lambda tensor: tensor * 2)
    assert type(doubled) is type(batch)
    assert [t.tolist() for t in tensors(doubled)] == [[2.0, 4.0], [[6]]]
    assert [t.tolist() for t in tensors(batch)] == [[1.0, 2.0], [[3]]]
    assert described(batch) == "2, 1x1"
    longer = mapped(batch, lambda tensor: torch.cat([tensor, tensor]))
    for look in (signature, fingerprint, lambda value: list(pieces(value))):
        assert look(batch) == look(mapped(batch, torch.clone))
        assert look(batch) != look(longer)


def test_what_is_no_container_is_left_alone() -> None:
    class Own:
        tensor = A

    for leaf in ("text", b"bytes", bytearray(b"b"), range(3), 1, None, np.ones(2), Own(), {1, 2}):
        assert list(leaves([leaf])) == [leaf]
        assert mapped([leaf], torch.clone)[0] is leaf


def test_containers_are_new_ones_and_keep_their_kind() -> None:
    class Named(dict[str, Any]):
        pass

    batch = Named(a=[A])
    batch.note = "kept"  # type: ignore[attr-defined]
    moved = mapped(batch, lambda tensor: tensor)
    assert moved is not batch
    assert moved["a"] is not batch["a"]
    assert moved.note == "kept"


def test_a_sequence_that_cannot_be_made_anew_stays_if_nothing_in_it_changes() -> None:
    class Rows(UserList[int]):
        def __init__(self, count: int) -> None:
            super().__init__([*range(count)])

    rows = Rows(3)
    assert mapped({"rows": rows}, torch.clone)["rows"] is rows


def test_leaves_of_any_kind_can_be_replaced() -> None:
    assert mapped_leaves([1, {"a": (2, "b")}], lambda leaf: leaf * 2) == [2, {"a": (4, "bb")}]


def test_structure_counts_in_a_fingerprint() -> None:
    assert fingerprint([1, 23]) != fingerprint([12, 3])
    assert fingerprint([[1], [2]]) != fingerprint([[1, 2]])
    assert fingerprint({"a": 1}) != fingerprint({"b": 1})
    assert fingerprint({"a": 1}) != fingerprint(["a", 1])
