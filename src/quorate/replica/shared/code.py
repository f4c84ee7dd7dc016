"""Code: the outside objects used by a function, as far as its instructions tell.

An outside name is followed along the attributes: for ``net.fc.weight`` the weight is used, for
``config.rate`` a number. Nothing is called and no property is read.
"""

from __future__ import annotations

import builtins
import dis
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

_ABSENT: Any = object()
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_NOTHING = ("CACHE", "PUSH_NULL", "EXTENDED_ARG", "NOP")


class Use(NamedTuple):
    """One place where code uses an outside object."""

    value: Any  # the used object
    name: str  # as written: ``net.fc``
    line: str  # file:line
    is_whole: bool  # whether the value itself is used, or an unknown part of it
    is_written: bool = False  # whether an attribute of the value is set: the last part of the name


def uses(function: FunctionType) -> Iterator[Use]:
    """Yield the outside objects that a function uses, also in nested functions."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    held = {name: cell.cell_contents for name, cell in cells.items() if _is_full(cell)}
    yield from _uses(function.__code__, function.__globals__, held)


class OutsideVariable(NamedTuple):
    """An outside variable that a function sets: ``global`` or ``nonlocal`` in the function."""

    name: str
    line: str  # file:line
    holder: Any  # the globals, or the cell

    def items(self) -> list[tuple[str, Any]]:
        """Return the name and the value, if there is a value."""
        if isinstance(self.holder, dict):
            return [(self.name, self.holder.get(self.name))]
        return [(self.name, self.holder.cell_contents)] if _is_full(self.holder) else []

    def put(self, items: Sequence[tuple[str, Any]]) -> None:
        """Set the value returned by ``items``."""
        if isinstance(self.holder, dict):
            self.holder.update(items)
        elif items:
            self.holder.cell_contents = items[0][1]
        elif _is_full(self.holder):
            del self.holder.cell_contents


def variables(function: FunctionType) -> Iterator[OutsideVariable]:
    """Yield the outside variables that a function sets."""
    code = function.__code__
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=False))
    for instruction in dis.get_instructions(code):
        name, position = instruction.argval, instruction.positions
        line = f"{Path(code.co_filename).name}:{position.lineno if position else None}"
        if instruction.opname == "STORE_GLOBAL":
            yield OutsideVariable(name, line, function.__globals__)
        elif instruction.opname == "STORE_DEREF" and name in cells:
            yield OutsideVariable(name, line, cells[name])


def is_of_library(code: CodeType, *, only_torch: bool = False) -> bool:
    """Return whether code is not the user's: of an installed package, or of Python itself."""
    return code.co_filename.startswith(_OURS if only_torch else _libraries()) or (
        code.co_filename.startswith("<frozen")
    )


def place(code: CodeType) -> str:
    """Return file:line of a function's beginning."""
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def attribute(value: Any, name: str) -> Any:
    """Return an attribute found without calling code; ``_ABSENT`` for all others."""
    if isinstance(value, torch.nn.Module):
        parts = (
            *(value.named_parameters(recurse=False), value.named_buffers(recurse=False)),
            value.named_children(),
        )
        for held in (vars(value), *map(dict, parts)):
            if name in held:
                return held[name]
    else:
        try:
            held = object.__getattribute__(value, "__dict__")
        except AttributeError:
            held = {}
        if name in held and not isinstance(value, type):
            return held[name]
    kind = value if isinstance(value, type) else type(value)
    for base in kind.__mro__:
        if name in base.__dict__:
            found = base.__dict__[name]
            is_called = hasattr(found, "__get__") and not isinstance(value, type)
            return _ABSENT if is_called else found
    return _ABSENT


def _uses(code: CodeType, names: Mapping[str, Any], held: Mapping[str, Any]) -> Iterator[Use]:
    file = Path(code.co_filename).name
    locals_: dict[str, Any] = {}  # modules and their members, imported within the function
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _NOTHING]
    imported: Any = _ABSENT
    at = 0
    while at < len(instructions):
        instruction = instructions[at]
        kind, name = instruction.opname, instruction.argval
        at += 1
        if kind == "IMPORT_NAME":
            imported = sys.modules.get(name, _ABSENT)
            follows = instructions[at].opname if at < len(instructions) else ""
            if follows.startswith("STORE") and "." in name:  # ``import a.b`` binds a
                imported = sys.modules.get(name.partition(".")[0], _ABSENT)
            if follows in ("STORE_FAST", "STORE_DEREF"):
                locals_[instructions[at].argval] = imported
            continue
        if kind == "IMPORT_FROM":
            part = _ABSENT if imported is _ABSENT else attribute(imported, name)
            if at < len(instructions) and instructions[at].opname in ("STORE_FAST", "STORE_DEREF"):
                locals_[instructions[at].argval] = part
            continue
        if kind in _LOADS or kind.startswith("LOAD_FAST"):
            value = _ABSENT
            if kind.startswith("LOAD_FAST"):
                value = locals_.get(name, _ABSENT) if isinstance(name, str) else _ABSENT
            elif kind in ("LOAD_GLOBAL", "LOAD_NAME"):
                value = names.get(name, getattr(builtins, name, _ABSENT))
            else:
                value = held.get(name, locals_.get(name, _ABSENT))
            if value is _ABSENT:
                continue
            position = instruction.positions
            line = f"{file}:{position.lineno}" if position and position.lineno else place(code)
            path, is_whole = name, True
            while at < len(instructions) and instructions[at].opname in _ATTRIBUTES:
                step = instructions[at].argval
                found = attribute(value, step)
                path = f"{path}.{step}"
                at += 1
                if found is _ABSENT:
                    is_whole = False
                    break
                value = found
            written = at < len(instructions) and instructions[at].opname == "STORE_ATTR"
            if written and is_whole:
                path = f"{path}.{instructions[at].argval}"
            yield Use(value, path, line, is_whole, written and is_whole)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _uses(constant, names, {**locals_, **held})


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  empty as long as its variable has no value
    except ValueError:
        return False
    return True


_OURS = tuple(
    str(Path(file).parent) + "/" for file in (torch.__file__ or "", str(Path(__file__).parents[2]))
)


@cache
def _libraries() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return (*_OURS, *(folder.rstrip("/") + "/" for folder in folders))


def is_module_of(value: object, package: str) -> bool:
    """Return whether a value is a module of a package, or the package."""
    return isinstance(value, ModuleType) and (value.__name__ + ".").startswith(package + ".")


def user_line(frame: FrameType | None) -> str:
    """Return file:line of the innermost frame of user code; empty if there is none."""
    while frame is not None:
        if not is_of_library(frame.f_code) and not frame.f_code.co_filename.startswith("<"):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def user_line_of(error: BaseException) -> str:
    """Return file:line of the innermost frame of user code in an error's traceback."""
    line, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not is_of_library(code) and not code.co_filename.startswith("<"):
            line = f"{Path(code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line
