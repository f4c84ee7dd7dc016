"""Recorded values: substitutes for values while forward is traced, with the example's values.

A plain symbolic trace has no values, so a branch, a loop or an unpacking ends it. A recorded value
answers with the example's value, and the answer is checked in every shard from then on: a forward
pass with the same branches for all shards can be traced, and a forward pass with varying branches
is detected and never computed wrongly.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from quorate.replica.nested import parts

if TYPE_CHECKING:
    from torch import fx


class CallRecorder(Protocol):
    """The recorder of operations on recorded values."""

    def function(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record and make a call."""

    def method(self, name: str, args: Any, kwargs: Any) -> Any:
        """Record and make a call of a method of the first argument."""

    def fixed(self, value: RecordedValue, how: Callable[[Any], Any]) -> Any:
        """Return ``how(value)``, and require the same result in every shard."""

    def quiet(self, call: Callable[[], Any]) -> Any:
        """Call a function without recording."""


class RecordedValue:
    """A value of the forward pass: the computing node, and the example's value.

    Not a tensor, and not disguised as a tensor: torch's code in C would look for a tensor's memory.
    The answers of ``isinstance`` are in ``listening.py``.
    """

    def __init__(self, recorder: CallRecorder, node: fx.Node, value: Any) -> None:
        for name, part in (("recorder", recorder), ("node", node), ("value", value)):
            object.__setattr__(self, f"_quorate_{name}", part)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Record a call of torch with a recorded value among its arguments, not seen by a mode."""
        found = next(recorded_in((args, kwargs or {})))
        return recorder_of(found).function(function, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        value, recorder = value_of(self), recorder_of(self)
        if isinstance(value, Mapping) and name in ("keys", "values", "items"):
            keys = recorder.fixed(self, tuple)
            found = {"keys": keys, "values": [self[k] for k in keys]}
            return lambda: found.get(name, [(k, self[k]) for k in keys])
        attribute = recorder.quiet(lambda: getattr(value, name))
        if callable(attribute) and not isinstance(attribute, torch.Tensor):
            return lambda *args, **kwargs: recorder.method(name, (self, *args), kwargs)
        return recorder.function(getattr, (self, name), {})

    def __setattr__(self, name: str, value: Any) -> None:
        recorder_of(self).function(setattr, (self, name, value), {})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record and make a call of a callable value."""
        return recorder_of(self).method("__call__", (self, *args), kwargs)

    def __bool__(self) -> bool:
        return bool(recorder_of(self).fixed(self, bool))

    def __int__(self) -> int:
        return int(recorder_of(self).fixed(self, int))

    def __index__(self) -> int:
        return int(recorder_of(self).fixed(self, operator.index))

    def __float__(self) -> float:
        return float(recorder_of(self).fixed(self, float))

    def __len__(self) -> int:
        return int(recorder_of(self).fixed(self, len))

    def __iter__(self) -> Iterator[Any]:
        if isinstance(value_of(self), Mapping):
            return iter(recorder_of(self).fixed(self, tuple))
        return iter([self[number] for number in range(recorder_of(self).fixed(self, len))])

    def __getitem__(self, key: Any) -> Any:
        return recorder_of(self).function(operator.getitem, (self, key), {})

    def __contains__(self, other: Any) -> bool:
        return bool(recorder_of(self).function(operator.contains, (self, other), {}))

    def __setitem__(self, key: Any, value: Any) -> None:
        recorder_of(self).function(operator.setitem, (self, key, value), {})

    def __hash__(self) -> int:
        value = value_of(self)
        return id(self) if isinstance(value, torch.Tensor) else hash(value)

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __str__(self) -> str:
        value = value_of(self)
        if isinstance(value, (int, float, torch.Size)):  # the text may be a key: f"layer{number}"
            return str(recorder_of(self).fixed(self, str))
        return recorder_of(self).quiet(lambda: str(value))  # type: ignore[no-any-return]

    __repr__ = __str__


def recorder_of(recorded: RecordedValue) -> CallRecorder:
    """Return the recorder of a recorded value."""
    return object.__getattribute__(recorded, "_quorate_recorder")  # type: ignore[no-any-return]


def node_of(recorded: RecordedValue) -> fx.Node:
    """Return the node that computes a recorded value."""
    return object.__getattribute__(recorded, "_quorate_node")  # type: ignore[no-any-return]


def value_of(recorded: RecordedValue) -> Any:
    """Return the example's value."""
    return object.__getattribute__(recorded, "_quorate_value")


def is_recorded(value: Any) -> bool:
    """Return whether an object is a recorded value."""
    return type(value) is RecordedValue


def recorded_in(value: Any) -> Iterator[RecordedValue]:
    """Yield the recorded values in nested containers, in a fixed order."""
    if is_recorded(value):
        yield value
        return
    for _, part in inner(value) or ():
        yield from recorded_in(part)


def mapped(value: Any, function: Callable[[RecordedValue], Any]) -> Any:
    """Return the same structure with ``function(recorded)`` instead of every recorded value."""
    if is_recorded(value):
        return function(value)
    found = inner(value)
    if found is None:
        return value
    items = {name: mapped(part, function) for name, part in found}
    if all(items[name] is part for name, part in inner(value) or ()):
        return value
    return made_of(value, items)


def builder(value: Any, numbers: Mapping[int, int]) -> Callable[[Sequence[Any]], Any]:
    """Return a function to build the same structure from values instead of recorded values.

    The function refers to no recorded value, whose example value, with its graph, would stay alive.

    Args:
        numbers: index of the value for each recorded value, by id.
    """
    if is_recorded(value):
        number = numbers[id(value)]
        return lambda values: values[number]
    found = inner(value)
    if found is None or not any(True for _ in recorded_in(value)):
        return lambda _: value
    parts_of = {name: builder(part, numbers) for name, part in found}
    kind = type(value)
    shell = None
    if isinstance(value, Mapping) and kind is not dict:
        shell = made_of(value, dict.fromkeys(parts_of))

    def build(values: Sequence[Any]) -> Any:
        return _made({name: part(values) for name, part in parts_of.items()}, kind, shell)

    return build


def made_of(container: Any, items: dict[Any, Any]) -> Any:
    """Return a container of the same kind with other items."""
    return _made(items, type(container), container)


def _made(items: dict[Any, Any], kind: type, like: Any) -> Any:
    if kind is slice:
        return slice(*items.values())
    if issubclass(kind, Mapping):
        copied: Any = {} if kind is dict else copy.copy(like)
        for name, item in items.items():  # Hugging Face's outputs refuse ``update``
            copied[name] = item
        return copied
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind(*items.values())
    return kind(items.values())  # type: ignore[call-arg]


def inner(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the parts of a container or a slice; None for any other object."""
    if type(value) is slice:
        return enumerate((value.start, value.stop, value.step))
    return parts(value)


def _of_one(function: Callable[..., Any]) -> Callable[[RecordedValue], Any]:
    return lambda self: recorder_of(self).function(function, (self,), {})


def _of_two(function: Callable[..., Any]) -> Callable[[RecordedValue, Any], Any]:
    return lambda self, other: recorder_of(self).function(function, (self, other), {})


def _turned(function: Callable[..., Any]) -> Callable[[RecordedValue, Any], Any]:
    return lambda self, other: recorder_of(self).function(function, (other, self), {})


# Each also has a reversed form and an in-place form.
_BINARY = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift"


def _define() -> None:
    for name in ("neg", "pos", "invert", "abs"):
        setattr(RecordedValue, f"__{name}__", _of_one(getattr(operator, name)))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(RecordedValue, f"__{name}__", _of_two(getattr(operator, name)))
    for name in _BINARY.split():
        plain, bare = getattr(operator, name), name.rstrip("_")
        setattr(RecordedValue, f"__{bare}__", _of_two(plain))
        setattr(RecordedValue, f"__r{bare}__", _turned(plain))
        setattr(RecordedValue, f"__i{bare}__", _of_two(getattr(operator, f"i{bare}")))


_define()
