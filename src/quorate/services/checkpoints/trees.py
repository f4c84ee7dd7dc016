"""Trees: nested Python values as JSON and named tensors, and back. Nothing is pickled.

A tree holds the state of any optimizer or scheduler: numbers, strings, None, lists, tuples, sets,
dicts with such keys, tensors, NumPy arrays and numbers, and references to parameters. In JSON, a
number or string stands for itself; every other value is an object whose first key names the kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from quorate.errors import CheckpointError
from quorate.services.checkpoints import tensor_file

MOST_NAME = 512  # characters of a tensor's name, without its number
MOST_DEEP = 8  # levels of a tree: a level takes up to three of the record's ``MOST_DEPTH`` brackets
_NUMBERS: Mapping[str, float] = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class TreeEncoder:
    """An encoder of trees as JSON, which collects the tensors of the trees.

    Args:
        parameters: the names of the model's parameters by ``id``: parameters are saved elsewhere.
    """

    def __init__(self, parameters: Mapping[int, str]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._named = parameters
        # By the ``id`` of a tensor or an array: the object and its tree, so that a shared object is
        # saved once. The reference keeps the object alive: a new object could get the id of a dead
        # one.
        self._encoded: dict[int, tuple[object, dict[str, Any]]] = {}

    def encode(self, value: Any, path: str, depth: int = 0) -> Any:
        """Return a tree for JSON.

        Args:
            path: the position of the value: used as the name of a tensor, and in error messages.
                Two values may have the same path.

        Raises:
            CheckpointError: the tree contains a value of an unsupported type.
        """
        if depth > MOST_DEEP:
            raise CheckpointError(path, f"nested more than {MOST_DEEP} deep, which is not saved")
        if value is None or type(value) in (bool, int, str):
            return value
        if isinstance(value, float) and not isinstance(value, np.generic):
            return value if math.isfinite(value) else {"float": str(float(value))}
        if id(value) in self._named:
            return {"parameter": self._named[id(value)]}
        if isinstance(value, torch.Tensor):
            return self._once(value, lambda: self._tensor(value, path))
        if isinstance(value, np.generic) or type(value) in (np.ndarray, np.memmap):
            return self._once(value, lambda: self._numpy(value, path))

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
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        raise CheckpointError(
            path,
            got=type(value).__name__,
            expected="a tensor, number or string, or lists, tuples and dicts of these, which can "
            "be saved",
            fix="keep such values, use another optimizer, or pass no run_dir",
        )

    def _once(self, value: object, encode: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the tree of a tensor or an array, the same object for repeated calls."""
        if id(value) not in self._encoded:
            self._encoded[id(value)] = value, encode()
        return self._encoded[id(value)][1]

    def _tensor(self, value: torch.Tensor, path: str) -> dict[str, Any]:
        plain = value.detach()
        if value.layout is not torch.strided or value.is_quantized:
            kind = "quantized" if value.is_quantized else f"of layout {value.layout}"
            raise CheckpointError(
                path,
                got=f"a tensor {kind}",
                expected="a dense tensor, which can be saved",
                fix="use another optimizer, or pass no run_dir",
            )
        # Resolve lazy conjugation and negation: the file stores plain elements.
        plain = plain.resolve_conj().resolve_neg()
        dense = plain.is_contiguous() or plain.numel() != _span(plain)
        strides: dict[str, Any] = {} if dense else {"stride": list(plain.stride())}
        dtype = str(plain.dtype).removeprefix("torch.")
        if dtype not in tensor_file.DTYPES:
            # safetensors has no complex128: store pairs of float64.
            if plain.dtype is not torch.complex128:
                raise CheckpointError(
                    path, got=f"a tensor of {dtype}", expected="a dtype that safetensors has"
                )
            plain, strides = torch.view_as_real(plain), {**strides, "dtype": dtype}
        key = self._name(path)
        self.tensors[key] = plain
        return {"tensor": key, **strides}

    def _numpy(self, value: Any, path: str) -> dict[str, Any]:
        copy = np.array(value)
        copy = copy.astype(copy.dtype.newbyteorder("="), copy=False)
        try:
            tensor = torch.from_numpy(copy)
        except TypeError:
            raise CheckpointError(
                path,
                got=f"a NumPy value of dtype {copy.dtype}",
                expected="numbers of a dtype that torch has, which can be saved",
                fix="keep such values",
            ) from None
        # Distinguish a zero-dimensional array from a NumPy number.
        is_array = {"is_array": True} if isinstance(value, np.ndarray) and not copy.ndim else {}
        return {"numpy": self._tensor(tensor, path), **is_array}

    def _name(self, path: str) -> str:
        """Return a unique name for a tensor: its path, and a number where needed."""
        name = start = path.encode(errors="backslashreplace").decode()[:MOST_NAME]
        number = len(self.tensors)
        while name in self.tensors:
            name, number = f"{start}#{number}", number + 1
        return name


class TreeDecoder:
    """A decoder of trees from JSON and tensors.

    Args:
        tensors: the saved tensors, by name.
        parameters: the model's parameters, by name.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]
    ) -> None:
        self._tensors = tensors
        self._named = parameters
        self._made: dict[str, torch.Tensor] = {}
        self._arrays: dict[str, Any] = {}  # NumPy arrays, by the names of their tensors

    def decode(self, tree: Any, depth: int = 0) -> Any:
        """Return the value that ``encode`` turned into a tree.

        Raises:
            CheckpointError: the JSON is not a tree.
        """
        if isinstance(tree, float) and not math.isfinite(tree):
            raise CheckpointError("no tree of values", f"{tree!r}")  # ``encode`` writes text
        if tree is None or isinstance(tree, bool | int | float | str):
            return tree
        if depth > MOST_DEEP or not isinstance(tree, dict) or not tree:
            raise CheckpointError("no tree of values", f"{tree!r:.80}")
        kind, content = next(iter(tree.items()))
        try:
            return _KINDS[kind](self, tree, content, depth + 1)
        except CheckpointError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CheckpointError("no tree of values", f"{tree!r:.80}: {error}") from error

    def _items(self, content: list[Any], depth: int) -> list[Any]:
        return [self.decode(item, depth) for item in content]

    def _tensor(self, tree: dict[str, Any], key: str) -> torch.Tensor:
        if key not in self._made:
            value = self._tensors[key]
            if tree.get("dtype") is not None:
                if self._dtype(tree["dtype"]) is not torch.complex128:
                    raise CheckpointError(f"tensor {key!r}", f"no pairs are {tree['dtype']!r:.80}")
                value = torch.view_as_complex(value)
            made = value.clone()
            if (stride := tree.get("stride")) is not None:
                made = torch.empty_strided(value.shape, stride, dtype=value.dtype)
                if len(stride) != value.ndim or _span(made) != value.numel():
                    raise CheckpointError(f"tensor {key!r}", f"no strides of it: {stride}")
                made.copy_(value)
            self._made[key] = made
        return self._made[key]

    def _numpy(self, tree: dict[str, Any], depth: int) -> Any:
        inner = tree["numpy"]
        array = self.decode(inner, depth).numpy()
        if array.ndim == 0 and not tree.get("is_array", False):
            return array[()]
        return self._arrays.setdefault(inner["tensor"], array)

    def _dtype(self, name: str) -> torch.dtype:
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError("no dtype", f"{name!r}")
        return dtype


_KINDS: Mapping[str, Callable[[TreeDecoder, dict[str, Any], Any, int], Any]] = {
    "float": lambda _d, _tree, text, _: _NUMBERS[text],
    "parameter": lambda d, _tree, name, _: d._named[name],
    "tensor": lambda d, tree, key, _: d._tensor(tree, key),
    "list": lambda d, _tree, content, depth: d._items(content, depth),
    "tuple": lambda d, _tree, content, depth: tuple(d._items(content, depth)),
    "set": lambda d, _tree, content, depth: set(d._items(content, depth)),
    "frozenset": lambda d, _tree, content, depth: frozenset(d._items(content, depth)),
    "dict": lambda d, _tree, content, depth: dict(d._items(pair, depth) for pair in content),
    "complex": lambda d, _tree, content, depth: complex(*d._items(content, depth)),
    "numpy": lambda d, tree, _, depth: d._numpy(tree, depth),
    "dtype": lambda d, _tree, name, _: d._dtype(name),
}


def _span(value: torch.Tensor) -> int:
    """Return the number of elements of memory from a tensor's first element to its last."""
    if value.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))


def require_like(value: Any, example: Any, where: str) -> None:
    """Check that a value has the same structure and types as an example, at every level.

    Raises:
        CheckpointError: a key is missing, or a type differs: a text instead of a number, say.
    """
    if isinstance(example, dict) and isinstance(value, dict):
        for key, inner in example.items():
            if key not in value:
                raise CheckpointError(where, f"{key!r:.80} is missing")
            require_like(value[key], inner, f"{where}.{key}")
    elif type(example) in (list, tuple) and type(example) is type(value):
        for inner, own in zip(value, example, strict=False):
            require_like(inner, own, where)
    elif example is not None and not _is_like(value, example):
        raise CheckpointError(
            where,
            got=f"{value!r:.80}",
            expected=f"a {type(example).__name__} like {example!r:.80}",
        )


def _is_like(value: Any, example: Any) -> bool:
    if isinstance(example, torch.Tensor) and isinstance(value, torch.Tensor):
        return value.shape == example.shape
    if isinstance(example, bool) or isinstance(value, bool):
        return type(value) is type(example)
    if isinstance(example, int | float):
        # An infinite value may become finite later: the best loss of a run, say.
        return isinstance(value, int | float) and (value in _ENDS or abs(value) < _MOST)
    return isinstance(value, type(example))


_ENDS, _MOST = (math.inf, -math.inf), 1e300
