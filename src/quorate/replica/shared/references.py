"""References: the objects reached by a model and a loss function: attributes, closures, globals.

``copy.deepcopy`` copies objects in attributes, lists and bound methods. It does not copy functions,
nor the objects they hold: cells of closures, default values, globals; and weak references. A copy
of a model with such a reference to the original is not independent.
"""

from __future__ import annotations

import functools
import random
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

import numpy as np
import torch

from quorate.replica.beside.composed import Composed
from quorate.replica.shared.code import is_of_library, place, uses, variables
from quorate.replica.shared.containers import MOST_ITEMS, Container
from quorate.replica.shared.switches import setter_name
from quorate.replica.torch_internals import compiled_function, compiled_original

MOST_OBJECTS = 100_000

_ATOMS = (
    *(int, float, complex, str, bytes, bytearray, bool, type(None), type(...), range, slice),
    *(np.ndarray, np.generic, CodeType, ModuleType, torch.Generator, torch.device, torch.dtype),
    *(torch.Size, torch.jit.ScriptFunction),
)
_WRITTEN_IN_PLACE = (
    *(torch.Tensor, np.ndarray, torch.Generator, np.random.Generator, np.random.RandomState),
    random.Random,
)
# Never called while a shard is computed, if the object exists already.
_BEFORE = ("__init__", "__new__", "__post_init__", "reset_parameters", "extra_repr", "__repr__")
# ``module.qconfig`` of torch's quantization: makes observers when a model is prepared, looks for
# the module's device, and is never called while a shard is computed.
_MAKES_OBSERVERS = "torch.ao.quantization.qconfig"


class SharedObjects(NamedTuple):
    """The findings about a model and its loss function."""

    originals: list[str]  # paths to objects that should have been copied
    draws: list[str]  # places that draw from Python's or NumPy's generator of the process
    switches: list[str]  # places that change settings of the whole process
    # Containers and attributes that code shares with other threads and may write, with their paths
    containers: list[Container]
    values: list[Any]  # shared values that may be written in place: tensors, generators


def found(
    copied: Mapping[str, object], shared: Mapping[str, object], originals: Mapping[int, str]
) -> SharedObjects:
    """Search all reachable objects.

    Args:
        copied: starting points by name for messages: objects copied for each tower.
        shared: starting points by name: objects shared by all towers. A loss function is not
            copied, nor is the object of a bound method, nor the objects it holds.
        originals: descriptions of objects that must not be reached, by ``id``.
    """
    walk = _ReferenceWalk(originals)
    for name, root in copied.items():
        walk.begin(name, root, is_shared=False)
    for name, root in shared.items():
        walk.begin(name, root, is_shared=True)
    walk.run()
    return walk.found


class _WalkStep(NamedTuple):
    value: Any
    way: str  # the path to the value
    by_code: bool  # from a function or an object that all copies share
    is_class: bool = False  # named by code, which may make instances of the class


class _ReferenceWalk:
    def __init__(self, originals: Mapping[int, str]) -> None:
        self.found = SharedObjects([], [], [], [], [])
        self._originals = originals
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # keeps objects alive, so that ids are not reused
        self._next: deque[_WalkStep] = deque()

    def begin(self, name: str, root: object, *, is_shared: bool) -> None:
        self._next.append(_WalkStep(root, name, by_code=is_shared))

    def run(self) -> None:
        while self._next and len(self._seen) < MOST_OBJECTS:
            # The class and attributes of objects of all kinds are read, and some proxies raise any
            # error.
            with suppress(Exception):
                self._visit(self._next.popleft())

    def _visit(self, step: _WalkStep) -> None:
        value = step.value
        if (what := self._originals.get(id(value))) is not None:
            line = f"{step.way} is {what}"
            if line not in self.found.originals:
                self.found.originals.append(line)
            return
        if step.by_code and isinstance(value, _WRITTEN_IN_PLACE):
            self.found.values.append(value)
        if isinstance(value, _ATOMS) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        self._next.extend(self._parts(step))

    def _parts(self, step: _WalkStep) -> Iterable[_WalkStep]:
        value, way = step.value, step.way
        if isinstance(value, torch.Tensor):
            return ()
        if isinstance(value, FunctionType):
            return self._function(value, way)
        if isinstance(value, MethodType):
            return [_WalkStep(value.__func__, way, True), step._replace(value=value.__self__)]
        if isinstance(value, functools.partial):
            parts = [
                (value.func, way),
                *((a, f"{way}, an argument of a partial") for a in value.args),
            ]
            parts += [(v, f"{way}, argument {k!r} of a partial") for k, v in value.keywords.items()]
            return [_WalkStep(part, label, step.by_code) for part, label in parts]
        if isinstance(value, (weakref.ref, weakref.ProxyType)):
            target = value() if isinstance(value, weakref.ref) else None
            return [_WalkStep(target, f"{way}, a weak reference,", True)]
        if isinstance(value, (staticmethod, classmethod)):
            return [_WalkStep(value.__func__, way, True)]
        if isinstance(value, property):
            functions = (value.fget, value.fset)
            return [_WalkStep(part, way, True) for part in functions if part is not None]
        if isinstance(value, BuiltinFunctionType):
            return [_WalkStep(getattr(value, "__self__", None), way, step.by_code)]
        if type(value).__module__ == _MAKES_OBSERVERS:
            return ()
        if isinstance(value, (dict, MappingProxyType)):  # other mappings may load items on access
            if step.by_code and isinstance(value, dict):
                self.found.containers.append(Container.of(value, way))
            items = _first(value.items())
            return [_WalkStep(v, f"{way}[{k!r}]", step.by_code) for k, v in items]
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            if step.by_code and not isinstance(value, (tuple, frozenset)):
                self.found.containers.append(Container.of(value, way))
            return [_WalkStep(v, f"{way}[{n}]", step.by_code) for n, v in enumerate(_first(value))]
        if isinstance(value, type):
            return self._class(value, way, instances=step.is_class)
        return self._instance(value, step)

    def _function(self, function: FunctionType, way: str) -> Iterator[_WalkStep]:
        if (original := compiled_function(function)) is not None:
            yield _WalkStep(original, way, True)  # without objects of the compiler
            return
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            yield _WalkStep(wrapped, way, True)
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for value in defaults:
            yield _WalkStep(value, f"{way} ({place(function.__code__)}), a default value,", True)
        is_library = is_of_library(function.__code__)
        if is_library:
            for name, cell in zip(
                function.__code__.co_freevars, function.__closure__ or (), strict=False
            ):
                value = _contents(cell)
                yield _WalkStep(value, f"{way} holds {name!r}, which", True)
            if is_of_library(function.__code__, only_torch=True):
                return
        if not is_library:
            for variable in variables(function):
                named = f"{variable.name!r} in {_named(function, way)} ({variable.line})"
                container = Container(variable.items, named, function, variable.put)
                self.found.containers.append(container)
            self.found.containers.append(Container.of(function, way))  # for attributes of functions
        for use in uses(function):
            if _is_shared_generator(use.value):
                self.found.draws.append(f"{use.name} ({use.line})")
            elif (setter := setter_name(use)) is not None:
                self.found.switches.append(f"{setter} ({use.line})")
            elif not is_library and _is_worth_it(use.value, use.is_whole):
                yield _WalkStep(
                    use.value, f"{use.name!r} in {_named(function, way)} ({use.line})", True, True
                )

    def _class(self, kind: type, way: str, *, instances: bool) -> Iterator[_WalkStep]:
        for base in kind.__mro__:
            if _is_pythons(base):
                continue
            for name, member in vars(base).items():
                if name in _BEFORE and not instances:
                    continue
                if name.startswith("__") and not callable(member):
                    continue
                yield _WalkStep(member, f"{way}.{name}", True)

    def _instance(self, value: Any, step: _WalkStep) -> Iterator[_WalkStep]:
        kind, way = type(value), step.way
        if isinstance(value, Composed):
            for name, function in value.functions.items():
                yield step._replace(value=function, way=f"{name} of {way}")
        if kind.__module__.partition(".")[0] == __name__.partition(".")[0]:
            return  # a trainer or a report: its content is for observers of the run
        is_module = isinstance(value, torch.nn.Module)
        if is_module and (original := compiled_original(value)) is not None:
            yield step._replace(value=original)
            return
        if kind.__module__.partition(".")[0] in sys.stdlib_module_names - {"__main__"}:
            return
        if isinstance(value, torch.jit.ScriptModule):
            return  # its code is no Python, and holds no outside objects
        held = dict(getattr(value, "__dict__", None) or {})
        for base in kind.__mro__:
            slots = base.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name):
                    held[name] = getattr(value, name)
        if step.by_code:  # even if empty: an attribute may be added
            self.found.containers.append(Container.of(value, way))
        for name, part in held.items():
            if is_module and name in ("_modules", "_parameters", "_buffers"):
                for inner, member in (part or {}).items():
                    yield step._replace(value=member, way=f"{way}.{inner}", is_class=False)
            elif is_module and name.endswith("_hooks") and isinstance(part, dict):
                for hook in part.values():
                    yield step._replace(value=hook, way=f"a hook of {way}", is_class=False)
            else:
                yield step._replace(value=part, way=f"{way}.{name}", is_class=False)
        if kind not in (torch.nn.Module, object):
            yield _WalkStep(kind, way, True)


def _named(function: FunctionType, way: str) -> str:
    name = function.__qualname__.rpartition("<locals>.")[2]
    return way if name in ("<lambda>",) or way.endswith(name.rpartition(".")[2]) else name


def _is_pythons(kind: type) -> bool:
    root = kind.__module__.partition(".")[0]
    return root in ("torch", "numpy") or (root in sys.stdlib_module_names and root != "__main__")


def _is_worth_it(value: object, is_whole: bool) -> bool:
    """Return False for a Python module of which only an unknown attribute is used."""
    return is_whole or isinstance(value, torch.nn.Module) or not isinstance(value, ModuleType)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _first(items: Iterable[Any]) -> list[Any]:
    return list(islice(items, MOST_ITEMS))


def _generators() -> tuple[object, object]:
    # The objects behind the functions of ``random`` and ``numpy.random``.
    return random.random.__self__, np.random.rand.__self__  # type: ignore[attr-defined]


def _is_shared_generator(value: object) -> bool:
    owner = getattr(value, "__self__", None) if callable(value) else None
    return owner is not None and any(owner is generator for generator in _generators())
