"""Trees: whatever optimizers and callbacks keep comes back as it was, or is refused in one line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.messages import expect_error
from support.small import DATA, trainer

import quorate
from quorate.errors import CheckpointError
from quorate.replica.digest import content
from quorate.services.checkpoints.tensor_file import DTYPES, laid_out
from quorate.services.checkpoints.trees import Decoder, Encoder

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
    encoder = Encoder({})
    tree = json.dumps(encoder.encode(value, "value"))
    stored = {
        name: (str(t.dtype).removeprefix("torch."), tuple(t.shape))
        for name, t in encoder.tensors.items()
    }
    laid_out(stored, {})  # a file can hold them
    copies = {name: t.contiguous() for name, t in encoder.tensors.items()}
    return Decoder(copies, {}).decode(json.loads(tree))


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
        assert bytes(content(left)) == bytes(content(right))
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


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_every_kind_of_value_comes_back_as_it_was(value: Any) -> None:
    require_same(value, there_and_back(value))


@pytest.mark.parametrize(
    "value",
    [
        {"lr": np.float64(0.1), "initial_lr": np.float64(0.5)},
        {1: torch.ones(1), "1": torch.zeros(1), (1,): torch.tensor([2.0])},
        {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, "a.b#1": torch.tensor([2.0])},
        {"x" * 9000: torch.ones(1), "x" * 9001: torch.zeros(1)},
        {"\ud800": torch.ones(1), "\\ud800": torch.zeros(1)},
        [torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag],
        [math.nan, math.inf, -math.inf, True, 1, 1.0, np.True_, np.int64(1), np.array(1)],
    ],
)
def test_values_that_are_taken_for_each_other_easily_are_not(value: Any) -> None:
    require_same(value, there_and_back(value))


def test_what_is_there_twice_is_one_object_again() -> None:
    shared, numbers = torch.ones(2), np.ones(2)
    one, two, three, four = there_and_back([shared, numbers, shared, numbers])
    assert one is three
    assert two is four


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
        Encoder({}).encode({"state": [value]}, "value")


class Keeps(quorate.Callback):
    """Keeps NumPy's numbers, and gives them to the optimizer, the model and itself."""

    def __init__(self) -> None:
        self.seen = {1: np.float32(0), "1": np.array([0.0, 1.0]), "n": np.int64(0)}
        self.seen["one"] = torch.arange(2.0)[::2]  # contiguous, and of stride 2

    def started(self, trainer: quorate.Run) -> None:
        self.trainer = trainer

    def updated(self, report: quorate.Report) -> None:
        self.seen[1] += np.float32(0.1)
        self.seen["1"] = self.seen["1"] * 2  # another object each time
        self.seen["n"] += 1
        (group,) = self.trainer.param_groups
        group["lr"] = np.float64(0.01) / np.float64(report.global_step)
        group["weight_decay"] = np.float32(0.1) * np.float32(report.global_step)
        group["counted"] = np.int32(report.global_step)
        self.trainer.model.scale = np.float64(report.global_step)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def test_a_run_with_numbers_of_numpy_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    def fit(run_dir: Path, steps: int) -> tuple[quorate.Trainer, Keeps]:
        def made(params: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW(params, lr=np.float64(0.02), weight_decay=np.float32(0.3))

        callback = Keeps()
        run = trainer(run_dir, 1, optimizer=made, schedule=None, summary_every_s=None)
        run.fit(DATA, steps=steps, callbacks=[callback])
        return run, callback

    whole, kept = fit(tmp_path / "whole", 7)
    fit(tmp_path / "parts", 3)
    resumed, kept_on = fit(tmp_path / "parts", 7)
    require_same(kept.seen, kept_on.seen)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    for left, right in zip(whole.param_groups, resumed.param_groups, strict=True):
        require_same(
            {name: value for name, value in left.items() if name != "params"},
            {name: value for name, value in right.items() if name != "params"},
        )
