"""Trees: nested values of Python as JSON and named tensors, and back. Nothing is pickled.

What optimizers and schedulers of any maker give as their state: numbers, strings, None, lists,
tuples, dicts with keys of these, tensors, and references to parameters. A number or string is
itself in JSON; all else is an object of one key that says what it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from quorate.errors import CheckpointError

MOST_DEEP = 8  # of a tree: a level takes up to three of the record's ``MOST_DEPTH`` brackets
_NUMBERS: Mapping[str, float] = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Encoder:
    """Makes JSON of trees, and collects their tensors.

    Args:
        parameters: the names of parameters by ``id``: they are saved elsewhere.
    """

    def __init__(self, parameters: Mapping[int, str]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._named = parameters
        self._keys: dict[int, str] = {}  # of tensors by id: one that is there twice is saved once

    def encode(self, value: Any, path: str, depth: int = 0) -> Any:
        """Return a tree for JSON.

        Args:
            path: where it is: a tensor gets its name from it, and an error message.

        Raises:
            CheckpointError: there is something in it that is no such value.
        """
        if depth > MOST_DEEP:
            raise CheckpointError(f"{path}: it is nested more than {MOST_DEEP} deep; not saved")
        if value is None or type(value) in (bool, int, str):
            return value
        if isinstance(value, float) and not isinstance(value, np.generic):
            return value if math.isfinite(value) else {"float": str(float(value))}
        if id(value) in self._named:
            return {"parameter": self._named[id(value)]}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)

        def inner(item: Any, name: object) -> Any:
            return self.encode(item, f"{path}.{name}", depth + 1)

        if type(value) in (list, tuple, set, frozenset):
            kind = type(value).__name__
            items = sorted(value, key=repr) if "set" in kind else value
            return {kind: [inner(item, number) for number, item in enumerate(items)]}
        if isinstance(value, dict):
            named = [(self._named.get(id(key), key), key) for key in value]
            return {"dict": [[inner(key, "key"), inner(value[key], name)] for name, key in named]}
        if isinstance(value, complex):
            return {"complex": [inner(value.real, "real"), inner(value.imag, "imag")]}
        if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biufc":
            return {"numpy": self._tensor(torch.from_numpy(np.array(value)), path)}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        kind = type(value).__name__
        raise CheckpointError(
            f"{path} is a {kind}, and only tensors, numbers, strings, and lists, tuples and dicts "
            "of these are saved; keep such, use another optimizer, or no run_dir"
        )

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        if value.layout is not torch.strided:
            raise CheckpointError(
                f"{path} is a tensor of layout {value.layout}, and only dense ones are saved; use "
                "another optimizer, or no run_dir"
            )
        key = self._keys.setdefault(id(value), path)
        self.tensors[key] = value.detach()
        dense = value.is_contiguous() or value.numel() != _span(value)
        return {"tensor": key} if dense else {"tensor": key, "stride": list(value.stride())}


class Decoder:
    """Makes trees of JSON and tensors.

    Args:
        tensors: by name.
        parameters: by name.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]
    ) -> None:
        self._tensors = tensors
        self._named = parameters
        self._made: dict[str, torch.Tensor] = {}

    def decode(self, tree: Any, depth: int = 0) -> Any:
        """Return what ``encode`` was given.

        Raises:
            CheckpointError: it is no tree.
        """
        if isinstance(tree, float) and not math.isfinite(tree):
            raise CheckpointError(f"no tree of values: {tree!r}")  # it is written as text
        if tree is None or isinstance(tree, bool | int | float | str):
            return tree
        if depth > MOST_DEEP or not isinstance(tree, dict) or not tree:
            raise CheckpointError(f"no tree of values: {tree!r:.80}")
        kind, content = next(iter(tree.items()))
        try:
            return _KINDS[kind](self, tree, content, depth + 1)
        except CheckpointError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CheckpointError(f"no tree of values: {tree!r:.80}: {error}") from error

    def _items(self, content: list[Any], depth: int) -> list[Any]:
        return [self.decode(item, depth) for item in content]

    def _dict(self, content: list[Any], depth: int) -> dict[Any, Any]:
        return {self.decode(key, depth): self.decode(value, depth) for key, value in content}

    def _tensor(self, tree: dict[str, Any], key: str) -> torch.Tensor:
        if key not in self._made:
            value = self._tensors[key]
            made = value.clone()
            if (stride := tree.get("stride")) is not None:
                made = torch.empty_strided(value.shape, stride, dtype=value.dtype)
                if len(stride) != value.ndim or _span(made) != value.numel():
                    raise CheckpointError(f"tensor {key!r}: no strides of it: {stride}")
                made.copy_(value)
            self._made[key] = made
        return self._made[key]

    def _numpy(self, tree: dict[str, Any], depth: int) -> Any:
        array = self.decode(tree, depth).numpy()
        return array[()] if array.ndim == 0 else array

    def _dtype(self, name: str) -> torch.dtype:
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"no dtype: {name!r}")
        return dtype


_KINDS: Mapping[str, Callable[[Decoder, dict[str, Any], Any, int], Any]] = {
    "float": lambda _d, _tree, text, _: _NUMBERS[text],
    "parameter": lambda d, _tree, name, _: d._named[name],
    "tensor": lambda d, tree, key, _: d._tensor(tree, key),
    "list": lambda d, _tree, content, depth: d._items(content, depth),
    "tuple": lambda d, _tree, content, depth: tuple(d._items(content, depth)),
    "set": lambda d, _tree, content, depth: set(d._items(content, depth)),
    "frozenset": lambda d, _tree, content, depth: frozenset(d._items(content, depth)),
    "dict": lambda d, _tree, content, depth: d._dict(content, depth),
    "complex": lambda d, _tree, content, depth: complex(*d._items(content, depth)),
    "numpy": lambda d, _tree, content, depth: d._numpy(content, depth),
    "dtype": lambda d, _tree, name, _: d._dtype(name),
}


def _span(value: torch.Tensor) -> int:
    """Return how many elements of memory lie between a tensor's first and last one."""
    if value.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))


def require_like(value: Any, example: Any, where: str) -> None:
    """Compare a value with one that has its place: are they of one kind, at every level?

    Raises:
        CheckpointError: a key is missing, or there is a text in the place of a number, say.
    """
    if isinstance(example, dict) and isinstance(value, dict):
        for key, inner in example.items():
            if key not in value:
                raise CheckpointError(f"{where}: {key!r:.80} is missing")
            require_like(value[key], inner, f"{where}.{key}")
    elif type(example) in (list, tuple) and type(example) is type(value):
        for inner, own in zip(value, example, strict=False):
            require_like(inner, own, where)
    elif example is not None and not _is_like(value, example):
        raise CheckpointError(
            f"{where}: got {value!r:.80}, expected a {type(example).__name__} like {example!r:.80}"
        )


def _is_like(value: Any, example: Any) -> bool:
    if isinstance(example, torch.Tensor) and isinstance(value, torch.Tensor):
        return value.shape == example.shape
    if isinstance(example, bool) or isinstance(value, bool):
        return type(value) is type(example)
    if isinstance(example, int | float):
        # What is infinite may be finite later: the best loss so far.
        return isinstance(value, int | float) and (value in _ENDS or abs(value) < _MOST)
    return isinstance(value, type(example))


_ENDS, _MOST = (math.inf, -math.inf), 1e300
