"""Copies of a model, for towers: with given parameters, and without a reference to the model.

``copy.deepcopy`` makes the copies. This module handles cases that deepcopy does not: tensors that a
module has computed and kept (weight normalisation, pruning), and scripted modules, whose parameters
belong to C++.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import torch

from quorate.errors import CopyError
from quorate.replica.compiling import compile_calls
from quorate.replica.model import laid_out, trainable
from quorate.replica.shared.containers import MOST_ITEMS

FIX = "use engine='processes', where no copy is needed"


def copy_of(
    model: torch.nn.Module,
    parameters: Mapping[str, torch.Tensor],
    shares: torch.device | None,
    mutable_frozen: Collection[int],
) -> torch.nn.Module:
    """Return a deep copy of a model with the given trainable parameters.

    Frozen parameters on the device ``shares`` are shared: they never change, except for those
    written by a forward pass.

    Raises:
        CopyError: the model cannot be copied.
    """
    memo: dict[int, Any] = {
        id(p): p
        for number, p in enumerate(model.parameters())
        if p.device == shares and not p.requires_grad and number not in mutable_frozen
    }
    return _copied(model, parameters, memo)


def deep_copy(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy with parameters of its own, of the same values."""
    with torch.no_grad():  # otherwise parameters of scripted modules would have a history
        copied: torch.nn.Module = copy.deepcopy(model, _stand_ins(model))
    compile_calls(model, copied)
    return copied


def copied_parts(model: torch.nn.Module) -> tuple[torch.nn.Module, set[int]]:
    """Return a trial copy, and the ids of the model's objects with a copy in the trial.

    The tensors are the model's, except for those of scripted modules.

    Raises:
        CopyError: the model cannot be copied.
    """
    memo: dict[int, Any] = {id(b): b.detach() for b in model.buffers()}
    memo |= {id(p): p for p in model.parameters() if not p.requires_grad}
    copied = _copied(model, {name: p.detach() for name, p in trainable(model).items()}, memo)
    return copied, {number for number, part in memo.items() if id(part) != number}


def refused(reason: str, fix: str = FIX) -> CopyError:
    """Return the error for a model that towers cannot copy."""
    expected = "a model of which each tower can have a copy"
    error = CopyError("engine", "towers", f"{expected}: {reason}", fix)
    error.reason = reason
    return error


def _copied(
    model: torch.nn.Module, parameters: Mapping[str, torch.Tensor], memo: dict[int, Any]
) -> torch.nn.Module:
    for name, parameter in laid_out(model, parameters).items():
        # By .data: otherwise a write to one copy would count as a write to all copies.
        memo[id(parameter)] = torch.nn.Parameter(parameters[name].data, parameter.requires_grad)
    for number, stands_in in _stand_ins(model).items():
        memo.setdefault(number, stands_in)
    try:
        with torch.no_grad():  # otherwise parameters of scripted modules would have a history
            copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise refused(f"copy.deepcopy said: {error}") from error
    compile_calls(model, copied)
    of_script = _of_scripts(copied)
    for name, parameter in copied.named_parameters():
        if id(parameter) in of_script:
            parameter.requires_grad_(name in parameters)
    theirs = laid_out(copied, parameters)
    reason = "its deep copy has other parameters than deepcopy is told to give it"
    if [*theirs] != [*parameters]:
        raise refused(reason)
    for name, view in parameters.items():
        if theirs[name].data_ptr() == view.data_ptr():
            continue
        # A model with a copy method of its own may make its parameters anew (Keras).
        if id(theirs[name]) not in of_script or theirs[name].shape != view.shape:
            raise refused(reason)
        theirs[name].data = view
    return copied


def _computed(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield computed tensors kept by modules: deepcopy refuses tensors with a history."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            for tensor in _tensors(value, depth=2):
                if tensor.grad_fn is not None:
                    yield f"{path}.{name}".lstrip("."), tensor


def _stand_ins(model: torch.nn.Module) -> dict[int, Any]:
    return {id(tensor): _stand_in(where, tensor) for where, tensor in _computed(model)}


def _stand_in(where: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a placeholder in a copy for a computed tensor until the next computation.

    The placeholder has no history. A gradient shows a use of the placeholder.
    """
    stands_in = tensor.detach().clone()
    if stands_in.is_floating_point() or stands_in.is_complex():
        stands_in.requires_grad_()
        stands_in.register_hook(partial(_used, where))  # type: ignore[no-untyped-call]
    return stands_in


def _used(where: str, _gradient: torch.Tensor) -> None:
    raise refused(f"its attribute {where!r} was computed before, a copy cannot tell from what")


def _of_scripts(model: torch.nn.Module) -> set[int]:
    """Return the ids of the parameters of scripted and traced modules."""
    scripts = [m for m in model.modules() if isinstance(m, torch.jit.ScriptModule)]
    return {id(parameter) for script in scripts for parameter in script.parameters()}


def _tensors(value: Any, *, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (dict, list, tuple)):
        items = value.values() if isinstance(value, dict) else value
        for item in islice(items, MOST_ITEMS):
            yield from _tensors(item, depth=depth - 1)
