"""Shared values: numbers, tensors and modules set by the main process and read by all workers.

For a coefficient that your code changes during training, a teacher that is averaged, or a memory
bank. Workers run the same script, and so have the same objects under the same names. The values
come from the coordinator with the shard to compute. Every shard reads the values of the time when
the shard was dealt; under "sync" no shard is in progress between two updates.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, NoReturn, Protocol
from weakref import WeakValueDictionary, ref

import numpy as np
import torch

from quorate.errors import SharedError
from quorate.replica.beside import traced_values
from quorate.replica.beside.at import is_loading

Simple = bool | int | float | str | None  # a value that JSON represents exactly
SIMPLE = (bool, int, float, str, type(None))

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*\Z")
_known: WeakValueDictionary[str, Shared] = WeakValueDictionary()


class Shared:
    """Named values that your code sets in the main process and that all workers read.

    Read the values in the loss function and in the model's forward pass, as attributes or items.
    Set the values in callbacks, and in the body of a loop over ``trainer.updates``; the shards
    dealt next are computed with the new values. Checkpoints contain the values; a resume restores
    them before the first update. Create a ``Shared`` next to the model, before training: worker
    processes run that part of the script too.

    Args:
        name: name of the group of values in checkpoints; unique in the script.
        values: initial values: numbers, strings, None; tensors of any size and shape; modules such
            as a teacher, of which the parameters and buffers are shared. A value may change, but a
            number, a tensor or a module must stay a number, a tensor or a module. In a loss
            function, tensors and modules are on the device of the worker, require no gradient and
            must not be written.

    Raises:
        SharedError: a name is not valid, or a value cannot be shared. Later: a name that was not in
            ``values`` is used, a worker sets a value, or code that loads rows reads a value.

    Example::

        anneal = quorate.Shared("anneal", beta=0.0)

        def loss(model, batch):
            return reconstruction(model, batch) + anneal.beta * divergence(model, batch)

        for report in trainer.updates(rows, epochs=5):
            anneal.beta = min(1.0, report.global_step / 1000)
    """

    __slots__ = ("__weakref__", "_live", "_name")
    _were_any: ClassVar[bool] = False  # in this process: most scripts make none
    _live: dict[str, Any]
    _name: str

    def __init__(self, name: str, /, **values: Simple | torch.Tensor | torch.nn.Module) -> None:
        for each in (name, *values):
            if not isinstance(each, str) or not _NAME.match(each):
                raise SharedError(
                    "Shared",
                    got=f"the name {each!r:.60}",
                    expected="letters, digits and underscores, a letter first",
                    fix="choose another",
                )
        live = {key: _checked(name, key, value) for key, value in values.items()}
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_live", live)
        _known[name], Shared._were_any = self, True
        for module in _modules(live):
            module.register_forward_pre_hook(_require_shared)

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_"):  # names that Python looks up on any object
            raise AttributeError(key)
        return self._value(key, AttributeError)

    def __getitem__(self, key: str) -> Any:
        return self._value(key, KeyError)

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        where = f"Shared {self._name!r}: {key}"
        if is_loading() or _local.reader is not None:
            raise SharedError(
                where,
                "the value is set while a shard is computed, and no other worker would see the "
                "new value",
                fix="set the value in a callback, or in the body of a loop over trainer.updates",
            )
        if key not in self._live:
            raise SharedError(
                where,
                got=f"the name {key!r}",
                expected=_listed(self._live),
                fix="name the value where the Shared is made",
            )
        value, before = _checked(self._name, key, value), self._live[key]
        if isinstance(before, torch.nn.Module) and value is not before:
            raise SharedError(
                where,
                got="another module",
                expected="the module that the Shared was made with, which the workers have",
                fix="call load_state_dict of that module",
            )
        if isinstance(before, torch.Tensor) is not isinstance(value, torch.Tensor):
            raise SharedError(
                where,
                got=type(value).__name__,
                expected=f"{_kind(before)}, as when the Shared was made",
            )
        self._live[key] = value

    def __delattr__(self, key: str) -> None:
        raise SharedError(
            f"Shared {self._name!r}",
            f"{key} cannot be deleted",
            fix="set another value",
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._live)

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: object) -> bool:
        return key in self._live

    def __repr__(self) -> str:
        return f"Shared({self._name!r}, {_listed(self._live)})"

    def __deepcopy__(self, _memo: dict[int, Any]) -> Shared:
        return self  # a copy of a model shares the object

    def __copy__(self) -> Shared:
        return self

    def __reduce__(self) -> NoReturn:
        raise SharedError(
            f"Shared {self._name!r}",
            "a Shared cannot be pickled",
            fix="make the Shared in every process",
        )

    def _value(self, key: str, missing: type[LookupError | AttributeError]) -> Any:
        if key not in self._live:
            raise missing(f"Shared {self._name!r} has {_listed(self._live)}, and no {key!r}")
        if (handed := traced_values.values()) is not None:
            return handed[f"{self._name}.{key}"]
        if is_loading():
            raise SharedError(
                f"Shared {self._name!r}",
                f"{key} is read while rows are loaded, before the updates that set {key}",
                fix="read the value in the loss function, or use quorate.data.at()",
            )
        reader = _local.reader or _of_autograd()
        if reader is None:
            return self._live[key]
        if _known.get(self._name) is not self:
            raise SharedError(
                f"Shared {self._name!r}",
                "a newer Shared has the same name, and this Shared receives no values",
                fix="use the newer one, or give each Shared a different name",
            )
        return reader.value(self._name, key)


# --- where shards are computed ------------------------------------------------------------------


class ValuesReader(Protocol):
    """The source of the values read by shards of one replica."""

    def value(self, name: str, key: str) -> Any:
        """Return a value, on the device of the replica."""


class _ThreadReader(threading.local):
    reader: ValuesReader | None = None


_local = _ThreadReader()
_newest: dict[int, ref[ValuesReader]] = {}  # of this process, by the device of the reader's thread


@contextmanager
def read_by(reader: ValuesReader) -> Iterator[None]:
    """Read values from the reader inside the block, where this thread computes a shard."""
    before, _local.reader = _local.reader, reader
    at = _device()
    _newest.pop(at, None)  # keeps the newest last
    _newest[at] = ref(reader)
    try:
        yield
    finally:
        _local.reader = before


def _of_autograd() -> ValuesReader | None:
    """Return the reader for a thread of autograd, where a checkpointed forward runs again.

    Such a thread is not made by Python. An accelerator has one such thread, at work for the only
    replica on the accelerator; for a replica of several devices, any of their threads may run.
    """
    if not _newest or not isinstance(threading.current_thread(), threading._DummyThread):
        return None
    return (_newest.get(_device()) or [*_newest.values()][-1])()


def _device() -> int:
    """Return the number of the thread's current accelerator; -1 without an accelerator."""
    return torch.accelerator.current_device_index() if torch.accelerator.is_available() else -1


# --- for the transfer of values -------------------------------------------------------------------


def are_any() -> bool:
    """Return whether the script has made a ``Shared``."""
    return Shared._were_any and bool(_known)  # called around each shard


def everyone() -> dict[str, Shared]:
    """Return all ``Shared`` objects by name, in the order of names."""
    return dict(sorted(_known.items()))


def all_read() -> dict[str, Any]:
    """Return the values read by this thread's shard, by ``name.key``.

    A ``Shared`` replaced by a newer object of the same name is left out: reading it raises an
    error.
    """
    reader, found = _local.reader, dict[str, Any]()
    for name, shared in everyone().items():
        for key, value in live(shared).items():
            with suppress(SharedError):
                read = value if reader is None else reader.value(name, key)
                found[f"{name}.{key}"] = read
    return found


def live(shared: Shared) -> dict[str, Any]:
    """Return the values of a ``Shared`` as set in this process."""
    return shared._live


def shared_modules() -> list[torch.nn.Module]:
    """Return the modules in all ``Shared`` objects, as made by the script."""
    return [module for shared in everyone().values() for module in _modules(live(shared))]


def tensors_of(key: str, value: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a value by name: the value, or a module's parameters and buffers."""
    if isinstance(value, torch.Tensor):
        return {key: value}
    if isinstance(value, torch.nn.Module):
        named = (*value.named_parameters(), *value.named_buffers())
        return {f"{key}.{name}": tensor.detach() for name, tensor in named}
    return {}


def _modules(live: dict[str, Any]) -> list[torch.nn.Module]:
    return [value for value in live.values() if isinstance(value, torch.nn.Module)]


def _require_shared(module: torch.nn.Module, _args: Any) -> None:
    """Refuse a direct call of a shared module by a shard: its values are this process's only.

    Raises:
        SharedError: a shard calls the module itself.
    """
    if (handed := traced_values.values()) is not None:
        if not any(module is value for value in handed.values()):
            raise SharedError("a module of a Shared is called itself")  # compiling hides the reason
        return
    if _local.reader is None and _of_autograd() is None:
        return
    for name, shared in everyone().items():
        for key, value in live(shared).items():
            if value is module:
                raise SharedError(
                    f"Shared {name!r}",
                    f"the module {key!r} is called directly while a shard is computed, and would "
                    "use the values "
                    "of this process",
                    fix=f"call {name}.{key}(...) of the Shared",
                )


def _checked(name: str, key: str, value: Any) -> Any:
    """Return a value as stored in a ``Shared``.

    Raises:
        SharedError: the value cannot be shared.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, torch.nn.Module):
        return value
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return value.detach() if value.requires_grad else value
    if value is None:
        return None
    for kind in (bool, int, float, str):  # an instance of a subclass becomes a plain value for JSON
        if isinstance(value, kind):
            return kind(value)
    raise SharedError(
        f"Shared {name!r}: {key}",
        got=type(value).__name__,
        expected="a number, a text, a dense tensor or a module",
        fix="share the parts of the value",
    )


def _kind(value: Any) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else "a number or a text"


def _listed(live: dict[str, Any]) -> str:
    return ", ".join(live) or "no names"
