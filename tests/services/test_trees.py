"""Trees: state of optimizers and callbacks comes back unchanged, or is refused in one line."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.digests import digest
from support.messages import expect_error

from quorate.errors import CheckpointError
from quorate.services.checkpoints.tensor_file import DTYPES, laid_out
from quorate.services.checkpoints.trees import TreeDecoder, TreeEncoder

NUMPY = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", ">i4", ">f8"),
]
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


def array(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    chance = np.random.default_rng(seed)
    values = np.array(chance.normal(size=shape)) + 1j * np.array(chance.normal(size=shape))
    kind = np.dtype(dtype)
    return (values if kind.kind == "c" else (100 * values.real) % 100).astype(kind)


def tensor(dtype: str, shape: tuple[int, ...], seed: int, turned: bool) -> torch.Tensor:
    bits = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed))
    value = (bits * 2).to(getattr(torch, dtype))
    return value.mT if turned and value.ndim >= 2 else value


ARRAYS = st.builds(array, st.sampled_from(NUMPY), SHAPES, st.integers(0, 99))
TENSORS = st.builds(
    tensor,
    st.sampled_from([*sorted(DTYPES), "complex128"]),
    SHAPES,
    st.integers(0, 99),
    st.booleans(),
)
KEYS = st.one_of(st.sampled_from([1, "1", True, "a.b", "a", "b", 1.5, None, (1, "1")]), st.text())
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.sampled_from([torch.float32, torch.bfloat16, -0.0]),
)
VALUES = st.recursive(
    st.one_of(PLAIN, ARRAYS, TENSORS, ARRAYS.filter(lambda a: a.ndim == 0).map(lambda a: a[()])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.sets(st.integers() | st.text(), max_size=3),
        st.frozensets(st.booleans() | st.none(), max_size=2),
    ),
    max_leaves=12,
)


def there_and_back(value: Any) -> Any:
    encoder = TreeEncoder({})
    tree = json.dumps(encoder.encode(value, "value"))
    stored = {
        name: (str(t.dtype).removeprefix("torch."), tuple(t.shape))
        for name, t in encoder.tensors.items()
    }
    laid_out(stored, {})  # a file can hold them
    copies = {name: t.contiguous().clone() for name, t in encoder.tensors.items()}
    decoded = TreeDecoder(copies, {}).decode(json.loads(tree))
    for stored_tensor in copies.values():  # the memory of a file, for the next reader
        stored_tensor.zero_()
    return decoded


def require_same(left: Any, right: Any) -> None:
    if isinstance(left, np.ndarray):
        assert isinstance(right, np.ndarray)
        assert left.dtype.newbyteorder("=") == right.dtype
        assert left.shape == right.shape
        assert np.ascontiguousarray(left, right.dtype).tobytes() == right.tobytes()
        return
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert left.numel() <= 1 or left.stride() == right.stride()
        assert digest([("", left)]) == digest([("", right)])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            require_same(one, other)
    elif isinstance(left, dict):
        require_same([*left], [*right])
        require_same([*left.values()], [*right.values()])
    elif isinstance(left, (float, complex, np.generic)):
        assert np.array(left).tobytes() == np.array(right).tobytes() or left != left
    else:
        assert left == right


@settings(max_examples=100, deadline=None)
@given(VALUES)
@example({1: torch.ones(1), "1": torch.zeros(1), (1,): torch.tensor([2.0])})
@example([torch.arange(6.0).reshape(2, 3).mT, torch.arange(2.0)[::2], np.float64(0.1)])
def test_every_kind_of_value_comes_back_as_it_was(value: Any) -> None:
    require_same(value, there_and_back(value))


@pytest.mark.parametrize(
    "value",
    [
        *(np.longdouble(1), np.datetime64("2020"), np.ma.array([1]), np.array(["a"]), object()),
        *(b"bytes", torch.Size([1]), torch.device("cpu"), torch.ones(2).to_sparse()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_saved_is_named(value: object) -> None:
    with expect_error(CheckpointError, name="value.state.0"):
        TreeEncoder({}).encode({"state": [value]}, "value")
