"""Batches of any structure: visited parts, and parts left alone."""

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


class Named(dict[str, Any]):
    """A kind of dict with an attribute."""

    note = ""


class Rows(UserList[int]):
    """A list that cannot be made anew from values."""

    def __init__(self, count: int) -> None:
        super().__init__([*range(count)])


def test_containers_are_new_ones_and_keep_their_kind() -> None:
    batch = Named(a=[A], rows=Rows(3))
    batch.note = "kept"
    moved = mapped(batch, lambda tensor: tensor)
    assert moved is not batch
    assert moved["a"] is not batch["a"]
    assert moved["rows"] is batch["rows"]  # as no part changes
    assert moved.note == "kept"
    assert mapped_leaves([1, {"a": (2, "b")}], lambda leaf: leaf * 2) == [2, {"a": (4, "bb")}]


def test_what_a_graph_is_compiled_for() -> None:
    one = signature([torch.ones(2, 3), {"a": 1, "b": "text"}])
    assert one == signature([torch.zeros(2, 3), {"a": 1, "b": "another"}])
    assert one != signature([torch.ones(2, 3).double(), {"a": 1, "b": "text"}])
    assert one != signature([torch.ones(3, 2).T, {"a": 1, "b": "text"}])
    assert one != signature([torch.ones(2, 3), {"a": 2, "b": "text"}])


# --- fingerprints: equal for equal values, and for these alone ------------------------------------

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
