"""The state of a model and a loss function beside parameters and buffers, by name, as hashes.

The state consists of attributes of modules and of their classes, variables in a function's closure,
and variables of the script that a function names. Workers do not share this state, and no
checkpoint saves it. Sizes are bounded: of a large value a part is hashed, of a deep value the outer
levels.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import operator
import random
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from quorate.replica.beside.composed import Composed
from quorate.replica.beside.shared import shared_modules
from quorate.replica.digest import content
from quorate.replica.nested import parts
from quorate.replica.placement.call_site import LIBRARIES

Kept = dict[str, str]  # by name: a hash, prefixed by a word for a generator or iterator


class ObjectAttribute(NamedTuple):
    """An attribute of an object that is no module."""

    hashed: str
    states: tuple[bytes, ...]  # hashes of generators, and of inner objects with a ``state_dict``


MOST_DEEP = 6
MOST_ITEMS = 512  # of a container, from its front and its back
MOST_VALUES = 50_000  # in all
MOST_ELEMENTS = 1 << 18  # of a tensor; a larger one is sampled at a fixed interval

_PATHS = (sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
_OF_OTHERS = (*LIBRARIES, *_PATHS)  # folders without scripts of the user
_INTERNALS = frozenset(vars(torch.nn.Module()))
_HOOKS = tuple(name for name in sorted(_INTERNALS) if name.endswith("_hooks"))
_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), PurePath, np.generic, Enum)
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
CACHED = type(functools.cache(len))  # the type of a function wrapped by ``functools.cache``
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
GENERATOR, ITERATOR = "generator ", "iterator "  # prefixes of the hashes of such values
_NO_TENSORS: dict[str, tuple[type, ...]] = {  # kinds of values that no buffer can hold
    GENERATOR: _GENERATORS,
    ITERATOR: (Iterator,),
}
_NAMES = (types.ModuleType, types.BuiltinFunctionType, type)


def kept(model: torch.nn.Module, function: Callable[..., Any]) -> Kept:
    """Return hashes of all kept state, by names for people.

    Args:
        function: the loss function.
    """
    return _StateWalk(model).all(function)


def kept_by(function: Callable[..., Any], model: torch.nn.Module) -> Kept:
    """Return hashes of the state that a function keeps or names, except for the model's state."""
    return _StateWalk(model).of(function)


def kept_beside(
    objects: Iterable[object],
    attributes: Mapping[str, Any],
    parameters: Mapping[str, torch.nn.Parameter],
    carried: Mapping[int, str],
) -> Kept:
    """Return hashes of the state that classes of objects keep and name, and of further attributes.

    Args:
        objects: objects of the user's classes: an optimizer, a schedule.
        attributes: attributes of the objects, by name.
        parameters: parameters whose own attributes are hashed.
        carried: names of objects that are hashed by name only, by ``id``.
    """
    look = _StateWalk(torch.nn.Module(), carried)
    for value in objects:
        look.object(value)
    return look.these(attributes, parameters)


def kept_in(
    attributes: Mapping[str, Any], model: torch.nn.Module, carried: Mapping[int, str]
) -> dict[str, ObjectAttribute]:
    """Return hashes of attributes of a user's object, by name.

    Objects with a ``state_dict`` are hashed by its result. All other objects without data, of
    classes outside of the script (files, bars, writers, the trainer), are hashed by name.

    Args:
        model: the model; objects of the model are hashed by name.
        carried: names of further objects hashed by name, by ``id``.
    """
    found, look = {}, _StateLook(model, carried)
    for name, value in attributes.items():
        look.states.clear()
        look._note(name, value)
        found[name] = ObjectAttribute(look._found[name], tuple(look.states))
    return found


def changed(before: Kept, after: Kept) -> list[str]:
    """Return the names of state that is new, gone, or changed."""
    names = [*after, *(name for name in before if name not in after)]
    return [name for name in names if before.get(name) != after.get(name)]


class _StateWalk:
    """One pass over all kept state."""

    def __init__(self, model: torch.nn.Module, carried: Mapping[int, str] | None = None) -> None:
        self._model = model
        # Objects in checkpoints are hashed by name wherever they appear, not by value.
        named = itertools.chain(model.named_parameters(), model.named_buffers())
        self._carried = {id(tensor): name for name, tensor in named}
        self._carried |= {id(module): f"module {n}" for n, module in model.named_modules()}
        self._carried |= {id(m): "shared" for each in shared_modules() for m in each.modules()}
        self._carried |= carried or {}
        self._values = 0
        self._known: dict[int, tuple[Any, bytes]] = {}
        self._functions: set[int] = set()
        self._found: Kept = {}

    def all(self, function: Callable[..., Any]) -> Kept:
        kinds: dict[type, None] = {}
        for path, module in self._model.named_modules():
            dot, kind = f"{path}." if path else "", type(module).__name__
            for name, value in vars(module).items():
                if name not in _INTERNALS:
                    self._note(f"{dot}{name} ({kind})", value)
            for name in () if isinstance(module, torch.jit.ScriptModule) else _HOOKS:
                for hook in vars(module).get(name, {}).values():
                    self._function(f"a hook of {path or 'the model'}", hook)
            for name, buffer in module.named_buffers(recurse=False):
                shape = f"buffer {tuple(buffer.shape)} {buffer.dtype}"
                self._found[f"{dot}{name} ({kind})"] = shape
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
                with suppress(Exception):  # user code may raise, and is not required to work
                    self._note(f"{dot}get_extra_state() ({kind})", module.get_extra_state())
            kinds[type(module)] = None
        for kind_of_module in kinds:
            self._class(kind_of_module)
        return self.of(function)

    def of(self, function: Callable[..., Any]) -> Kept:
        self._function("the loss function", function)
        return self._found

    def object(self, value: object) -> None:
        """Note the state that an object's class keeps and names, and the object's functions."""
        self._class(type(value))
        for name, own in [*vars(value).items()]:
            # By dict's own method: the mapping of an optimizer's states would contact all ranks.
            items = dict.values(own) if isinstance(own, dict) else own
            for function in items if isinstance(own, (dict, list, tuple)) else (own,):
                if isinstance(function, _FUNCTIONS):
                    self._function(f"{type(value).__name__}.{name}", function)

    def these(
        self, attributes: Mapping[str, Any], parameters: Mapping[str, torch.nn.Parameter]
    ) -> Kept:
        for name, value in attributes.items():
            if isinstance(value, _FUNCTIONS):
                self._function(name, value)
            else:
                self._note(f"{name}, a {type(value).__name__},", value)
        for path, parameter in parameters.items():
            for name, value in vars(parameter).items():
                if name.startswith("_dynamo_"):  # of torch.compile
                    continue
                self._note(f"attribute {name} of parameter {path!r}", value)
        return self._found

    def _note(self, name: str, value: Any) -> None:
        kind = next(
            (kind for kind, types_of in _NO_TENSORS.items() if isinstance(value, types_of)), ""
        )
        try:
            self._found[name] = kind + self._hash(value, 0).hex()
        except Exception:  # a concurrent change, or an attribute that raises
            self._found[name] = ""

    def _class(self, kind: type) -> None:
        """Note the state of a user's class, and the variables named by methods."""
        for base in kind.__mro__:
            if _is_of_others(base):
                continue
            for name, value in vars(base).items():
                if not name.startswith("__") and not _is_code(value):
                    self._note(f"{base.__name__}.{name} (class attribute)", value)
            for value in vars(base).values():
                if isinstance(value, types.FunctionType):
                    self._function(f"{base.__name__}.{value.__name__}", value)

    def _function(self, name: str, function: Any, depth: int = 0) -> None:
        """Note a function's closure, defaults, and the script's variables named in the code."""
        if id(function) in self._functions or depth > MOST_DEEP:
            return
        self._functions.add(id(function))
        if isinstance(function, functools.partial):
            self._note(f"an argument of {name}", (function.args, function.keywords))
            self._function(name, function.func, depth + 1)
        elif isinstance(function, types.MethodType):
            if id(function.__self__) not in self._carried:
                self._note(
                    f"the object of {name} ({type(function.__self__).__name__})", function.__self__
                )
            self._function(name, function.__func__, depth + 1)
        elif isinstance(function, types.FunctionType):
            self._code(name, function, depth)
            if (wrapped := vars(function).get("__wrapped__")) is not None:  # by a decorator
                self._function(name, wrapped, depth + 1)
        elif isinstance(function, Composed):
            for named, called in function.functions.items():
                self._function(named, called, depth + 1)
        elif not isinstance(function, _NAMES) and id(function) not in self._carried:
            self._note(f"{name} (an object of class {type(function).__name__})", function)
            called = vars(type(function)).get("__call__")
            if isinstance(called, types.FunctionType):
                self._function(f"{type(function).__name__}.__call__", called, depth + 1)

    def _code(self, name: str, function: types.FunctionType, depth: int) -> None:
        code = function.__code__
        if code.co_filename.startswith((*_OF_OTHERS, "<frozen")):
            return
        closure = zip(code.co_freevars, function.__closure__ or (), strict=False)
        for variable, cell in closure:
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self._variable(f"{variable!r} in the closure of {name}", value, depth)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._variable(f"a default argument of {name}", value, depth)
        for attribute, value in [*vars(function).items()]:
            self._note(f"the attribute {attribute!r} of {name}", value)
        file = Path(code.co_filename).name
        for variable in names_of(code):
            if variable in function.__globals__:
                value = function.__globals__[variable]
                self._variable(f"{variable!r} ({file})", value, depth)

    def _variable(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, _FUNCTIONS):
            own = getattr(value, "__name__", None) or "a function"
            self._function(own, value, depth + 1)
        elif isinstance(value, torch.nn.Module) or not (
            isinstance(value, _NAMES) or (_is_of_others(type(value)) and not _is_data(value))
        ):
            self._note(name, value)

    def _hash(self, value: Any, depth: int) -> bytes:
        self._values += 1
        kind = f"{type(value).__name__};"
        if id(value) in self._carried:
            return f"{kind}{self._carried[id(value)]};".encode()
        if isinstance(value, _PLAIN + _OF_TORCH):
            return f"{kind}{value!r};".encode()
        if id(value) in self._known:
            return self._known[id(value)][1]
        if depth > MOST_DEEP or self._values > MOST_VALUES:
            return kind.encode()
        self._known[id(value)] = value, kind.encode()  # for a container that contains itself
        hashed = hashlib.blake2b(kind.encode(), digest_size=8)
        if isinstance(value, torch.Tensor):
            _feed_tensor(hashed, value)
        elif isinstance(value, np.ndarray) and value.dtype != object:
            hashed.update(f"{value.dtype} {value.shape};".encode())
            hashed.update(np.ascontiguousarray(value.reshape(-1)[_every(value.size)]).tobytes())
        elif (text := _state_text(value)) is not None:
            hashed.update(text.encode())
        else:
            for part in self._parts(value):
                hashed.update(self._hash(part, depth + 1))
        # The value is kept alive too: an id is reused after the end of its object.
        self._known[id(value)] = value, hashed.digest()
        return hashed.digest()

    def _parts(self, value: Any) -> Iterator[Any]:
        return _parts(value)


class _StateLook(_StateWalk):
    """One pass over an attribute of an object whose state is not saved."""

    def __init__(self, model: torch.nn.Module, carried: Mapping[int, str]) -> None:
        super().__init__(model, carried)
        self.states: list[bytes] = []

    def _hash(self, value: Any, depth: int) -> bytes:
        hashed = super()._hash(value, depth)
        if isinstance(value, _GENERATORS) or _has_state_dict(value):
            self.states.append(hashed)
        return hashed

    def _parts(self, value: Any) -> Iterator[Any]:
        kind = type(value)
        if isinstance(value, (torch.utils.data.Dataset, *_NAMES)):
            return  # made anew by the script, with its caches
        if _has_state_dict(value):
            yield value.state_dict()
        elif _is_data(value) or not _is_of_others(kind):
            yield from _parts(value)


def _has_state_dict(value: Any) -> bool:
    names = ("state_dict", "load_state_dict")
    return not isinstance(value, type) and all(callable(getattr(value, n, None)) for n in names)


def _feed_tensor(hashed: Any, tensor: torch.Tensor) -> None:
    hashed.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
    try:
        flat = tensor.detach().reshape(-1)[_every(tensor.numel())]
        hashed.update(content(flat).data)
    except (RuntimeError, NotImplementedError, TypeError):  # on meta, sparse, nested
        pass


def _every(elements: int) -> slice:
    return slice(None, None, -(-elements // MOST_ELEMENTS) or 1)


def _state_text(value: Any) -> str | None:
    """Return the state of a generator or an iterator; None for any other object."""
    if isinstance(value, torch.Generator):
        return hashlib.blake2b(content(value.get_state()).data).hexdigest()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if isinstance(value, CACHED):
        return f"{value.cache_info().currsize} cached"
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, Iterator):
        try:
            return f"{operator.length_hint(value)} left"
        except Exception:  # of the user's class
            return ""
    return None


def _parts(value: Any) -> Iterator[Any]:
    """Yield the parts of a value, as far as they can be compared."""
    if isinstance(value, Set):
        yield sorted(map(repr, value)) if len(value) <= MOST_ITEMS else len(value)
    elif isinstance(value, Mapping):
        yield len(value)
        for key, part in _ends(value.items(), len(value)):
            yield key
            yield part
    elif (inner := parts(value)) is not None:
        yield len(value)
        for _, part in _ends(inner, len(value)):
            yield part
    elif isinstance(value, functools.partial):
        yield from (value.args, value.keywords, value.func)
    elif isinstance(value, types.MethodType):
        yield value.__func__.__qualname__
    elif isinstance(value, types.FunctionType):
        yield value.__qualname__
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
        yield from value.buffers()
        for module in value.modules():
            yield from (part for name, part in vars(module).items() if name not in _INTERNALS)
    elif not isinstance(value, _NAMES) and not _is_standard(type(value)):
        yield from getattr(value, "__dict__", {}).values()
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                yield getattr(value, name, None)


def _ends(items: Any, count: int) -> Iterator[Any]:
    if count <= MOST_ITEMS:
        yield from items
        return
    half = MOST_ITEMS // 2
    yield from itertools.islice(items, half)
    yield from itertools.islice(items, max(0, count - 2 * half), None)


def names_of(code: types.CodeType) -> Iterator[str]:
    """Yield the script's variables read or set by a function, or by functions inside."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from names_of(inner)


def _is_code(value: Any) -> bool:
    descriptors = (property, staticmethod, classmethod, functools.cached_property)
    return isinstance(value, (*_FUNCTIONS, *_NAMES, *descriptors)) or inspect.isdatadescriptor(
        value
    )


def _is_data(value: Any) -> bool:
    """Return whether an object of a library's class holds values, and can be compared."""
    known = (*_PLAIN, *_OF_TORCH, torch.Tensor, np.ndarray, Set)
    return isinstance(value, known) or parts(value) is not None or _state_text(value) is not None


def _once_per_class(ask: Callable[[type], bool]) -> Callable[[type], bool]:
    """Return a function that caches answers per class, while the class lives.

    A class may refer to a whole model: the class of a parametrized module does. A cached class
    would keep the parameters alive.
    """
    answers: WeakKeyDictionary[type, bool] = WeakKeyDictionary()

    def answer(kind: type) -> bool:
        found = answers.get(kind)
        if found is None:
            found = answers[kind] = ask(kind)
        return found

    return answer


@_once_per_class
def _is_of_others(kind: type) -> bool:
    """Return whether a class is torch's, Python's, or of an installed package."""
    if kind.__module__ == "builtins":
        return True
    try:
        file = inspect.getfile(kind)
    except (TypeError, OSError):
        return kind.__module__ != "__main__"
    return file.startswith(_OF_OTHERS)


@_once_per_class
def _is_standard(kind: type) -> bool:
    """Return whether a class is Python's own, torch's or quorate's: locks, loggers, files."""
    if kind.__module__ == "builtins":
        return True
    try:
        file = inspect.getfile(kind)
    except (TypeError, OSError):
        return kind.__module__ not in ("__main__", "types", "argparse")
    site = tuple(sysconfig.get_paths()[name] for name in ("purelib", "platlib"))
    in_standard = file.startswith(sysconfig.get_paths()["stdlib"]) and not file.startswith(site)
    return in_standard or file.startswith(LIBRARIES)
