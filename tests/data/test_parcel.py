"""Parcels: what comes out of one is what went in, to the bit and to the layout."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.few_descriptors import no_descriptor_left

from quorate.data.parcel import pack, unpack
from quorate.errors import UserError


def sent(batch: Any) -> tuple[Any, str | None]:
    here, there = socket.socketpair()
    with here, there:
        sender = threading.Thread(target=lambda: pack(here, batch))
        sender.start()
        try:
            return unpack(there)
        finally:
            sender.join()


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    lies = tensor.data_ptr() % 64 if tensor.numel() else 0
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), lies, tensor.requires_grad


LARGE = torch.arange(3_000_000, dtype=torch.float32)
TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.randn(5, 7),
    "large": lambda: LARGE,
    "empty": lambda: torch.empty(0, 3),
    "scalar": lambda: torch.tensor(3.5, dtype=torch.float64),
    "half": lambda: torch.randn(5).to(torch.bfloat16),
    "bool": lambda: torch.tensor([True, False]),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(4, 6).t(),
    "expanded": lambda: torch.randn(1, 6).expand(1000, 6),
    "rows of a large one": lambda: LARGE[77:99],
    "columns of a large one": lambda: LARGE.view(3000, 1000)[5:9, 3:7],
    "leaf with a gradient": lambda: torch.randn(3, requires_grad=True),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "parameter": lambda: torch.nn.Parameter(torch.randn(3)),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors(kind: str) -> None:
    tensor = TENSORS[kind]()
    (got, text), problem = sent((tensor, "beside it"))
    assert (text, problem) == ("beside it", None)
    assert type(got) is type(tensor)
    assert torch.equal(got.to_dense(), tensor.to_dense())
    if tensor.layout is torch.strided and kind != "conjugate":
        assert layout(got) == layout(tensor)
    if "of a large one" in kind:
        assert got.untyped_storage().nbytes() < 100_000


def test_what_shares_memory_still_does() -> None:
    whole = torch.zeros(8)
    (first, second, third, same), _ = sent((whole[:4], whole[4:], whole.view(2, 4), whole))
    same[5] = 3.0
    assert second.tolist() == [0.0, 3.0, 0.0, 0.0]
    assert third[1].tolist() == second.tolist()
    assert first.tolist() == [0.0] * 4


def test_arrays_and_whatever_else() -> None:
    array = np.arange(12.0).reshape(3, 4)
    batch = {"a": array, "t": array.T, "strided": array[:, ::2], "n": [1, None, "é"], "b": b"x" * 9}
    got, problem = sent(batch)
    assert problem is None
    for name in ("a", "t", "strided"):
        assert np.array_equal(got[name], batch[name])
    assert got["a"].flags.writeable
    assert got["n"] == batch["n"]
    assert got["b"] == batch["b"]


def test_what_cannot_be_sent_is_said_and_the_next_one_comes() -> None:
    here, there = socket.socketpair()
    with here, there:
        for batch in (lambda: 0, torch.randn(3, requires_grad=True) * 2, "sound"):
            pack(here, batch)
        nothing, problem = unpack(there)
        assert nothing is None
        assert problem is not None
        assert "lambda" in problem
        assert unpack(there)[1] == (
            "PicklingError: a tensor that was computed from others, with a gradient"
        )
        assert unpack(there) == ("sound", None)
        here.close()
        with pytest.raises(EOFError):
            unpack(there)


def test_memory_that_is_lost_on_its_way_is_named_at_once() -> None:
    """It would be waited for in the socket, for ever."""
    here, there = socket.socketpair()
    with here, there:
        pack(here, torch.zeros(1 << 20))
        with no_descriptor_left(), pytest.raises(UserError, match="descriptors"):
            unpack(there)
