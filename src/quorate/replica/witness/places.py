"""A script's reads of the process's place among all ranks: torchrun's variables, by name.

A loss that reads the rank differs between ranks, and a learning rate multiplied by the number of
ranks makes the training depend on the number. So code is searched for such reads: in a loss and a
model, for any of these variables; in the rest of a script, only for the number of processes,
because scripts use the rank to decide who prints.

Legend: WORLD_SIZE, RANK and similar variables are set by torchrun for each process.
"""

from __future__ import annotations

import ast
import dis
import sys
import sysconfig
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from quorate.machine.environment import READ_BY_CALL, READ_BY_ITEM
from quorate.replica.loss import Loss
from quorate.replica.placement.call_site import LIBRARIES
from quorate.replica.witness.data_writes import functions_of

_SIZES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
_PLACES = (*_SIZES, "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")
_FUNCTIONS = ("get_node_local_rank", "is_torchelastic_launched")  # of torch; these read a variable
MOST_BYTES = 1_000_000  # of a module that is searched


def place_doubts(model: torch.nn.Module, loss: Loss) -> list[str]:
    """Return messages about code that reads a place, a line per place in the code."""
    found = [
        f"the model or the loss reads {name} ({where}): the value differs between ranks; remove "
        "the read, because a shard must not depend on the rank that computes it"
        for name, where in reads_of_shards(model, loss, _PLACES, by=(READ_BY_ITEM, READ_BY_CALL))
    ]
    found += [
        f"the model or the loss calls {name}() ({where}): the result differs between ranks; remove "
        "the call, because a shard must not depend on the rank that computes it"
        for name, where in reads_of_shards(model, loss, _FUNCTIONS)
    ]
    if not found:
        found = [
            f"the script reads {name} ({where}): values computed from it change with the number of "
            "ranks; remove it, because batch_size and the learning rate hold for all ranks together"
            for file in _files_of_script()
            for name, where in _sizes_in(file)
        ]
    return [*dict.fromkeys(found)]


def reads_of_shards(
    model: torch.nn.Module, loss: Loss, names: Sequence[str], by: Sequence[str] = ()
) -> Iterator[tuple[str, str]]:
    """Yield those of some names and texts found in the code of a model or a loss, with the line.

    Args:
        by: names to be found in the same code, at least one of them; empty: none is required.
    """
    for function in functions_of(model, loss):
        yield from _reads_of(function.__code__, names, by)


def _reads_of(
    code: types.CodeType, names: Sequence[str], by: Sequence[str]
) -> Iterator[tuple[str, str]]:
    counts = not by or not set(by).isdisjoint(code.co_names)
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = instruction.starts_line or line
        value = instruction.argval
        if isinstance(value, types.CodeType):
            yield from _reads_of(value, names, by)
        elif counts and isinstance(value, str) and value in names:
            yield value, f"{Path(code.co_filename).name}:{line}"


def _files_of_script() -> Iterator[Path]:
    """Yield the files of the modules that are neither installed nor Python's own."""
    paths = sysconfig.get_paths()
    others = (*LIBRARIES, *(paths[name] for name in ("stdlib", "purelib", "platlib")))
    for module in [*sys.modules.values()]:
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and not file.startswith(others):
            yield Path(file)


def _sizes_in(file: Path) -> Iterator[tuple[str, str]]:
    """Yield each number of processes read by a file, with the line.

    Reads for a direct comparison with a number are left out: whether there are several processes
    changes no value.
    """
    try:
        if file.stat().st_size > MOST_BYTES:
            return
        text = file.read_text()
        tree = ast.parse(text) if any(name in text for name in _SIZES) else ast.Module([], [])
    except (OSError, ValueError, SyntaxError):  # the file is gone, or is no Python by now
        return
    compared = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        name = _read_by(node)
        if name in _SIZES and id(node) not in compared:
            yield str(name), f"{file.name}:{getattr(node, 'lineno', 0)}"


def _read_by(node: ast.AST) -> object:
    """Return the variable that an expression reads from the environment, or None."""
    if isinstance(node, ast.Subscript) and _names(node.value, READ_BY_ITEM):
        return getattr(node.slice, "value", None) if isinstance(node.ctx, ast.Load) else None
    if isinstance(node, ast.Call) and node.args:
        asks = isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop")
        of_environ = (
            asks and isinstance(node.func, ast.Attribute) and _names(node.func.value, READ_BY_ITEM)
        )
        if of_environ or _names(node.func, READ_BY_CALL):
            return getattr(node.args[0], "value", None)
    return None


def _names(node: ast.AST, name: str) -> bool:
    return getattr(node, "attr", getattr(node, "id", None)) == name
