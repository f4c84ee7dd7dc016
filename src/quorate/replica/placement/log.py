"""The placement log: the device of each operator, by module."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quorate.machine.text import aligned
from quorate.replica.nested import tensors
from quorate.replica.placement.call_site import CallSites
from quorate.replica.torch_internals import OperatorMode

COLUMNS = ("module", "class", "operator", "device", "forward", "backward")
COUNTS = (4, 5)  # columns of numbers
MOST_ROWS = 40  # in a longer table, modules with equal entries share a row
UPDATE = "where the update runs: "

_Row = tuple[str, ...]  # a cell for each of COLUMNS


@dataclass
class _CallCounts:
    forward: int = 0
    backward: int = 0


class PlacementLog(OperatorMode):
    """A context that notes each operator called by this thread, including the backward pass.

    Views and uninitialised memory, which compute nothing, are left out.

    Example:
        with PlacementLog(model) as log:
            model(x).sum().backward()
        print(log.table())

    Args:
        model: the model whose modules are named.
        until: file of the frame where the search for a caller ends.
    """

    def __init__(self, model: torch.nn.Module, until: str = "") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call_sites = CallSites(model, until)
        # (path, class) -> (operator, device) -> counts; in order of the first call
        self._modules: dict[tuple[str, str], dict[tuple[str, str], _CallCounts]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        returned = func(*args, **(kwargs or {}))
        call_site, in_backward = self._call_sites.find(sys._getframe(1))
        name = func.name().partition(".")[0].removeprefix("aten::")
        where = _where((args, kwargs), returned)
        # Such an operator belongs to the code that computes the shard.
        is_own = not (call_site.kind or call_site.line or in_backward)
        if func.is_view or "empty" in name or not where or is_own:
            return returned
        operators = self._modules.setdefault(
            (call_site.module, call_site.kind), defaultdict(_CallCounts)
        )
        calls = operators[name, where]
        if in_backward:
            calls.backward += 1
        else:
            calls.forward += 1
        return returned

    def table(self) -> str:
        """Return a line per module, operator and device, with the numbers of calls.

        For a model with many modules, modules of one class with equal entries share a line.
        """
        modules = [([path], kind, operators) for (path, kind), operators in self._modules.items()]
        if sum(len(operators) for *_, operators in modules) > MOST_ROWS:
            alike: dict[Any, tuple[list[str], str, dict[tuple[str, str], _CallCounts]]] = {}
            for paths, kind, operators in modules:
                did = kind, tuple((k, c.forward, c.backward) for k, c in sorted(operators.items()))
                alike.setdefault(did, ([], kind, operators))[0].extend(paths)
            modules = [*alike.values()]
        rows = [row for module in modules for row in _rows(*module)]
        return aligned([COLUMNS, *rows], right=COUNTS)


def _rows(
    paths: list[str], kind: str, operators: Mapping[tuple[str, str], _CallCounts]
) -> Iterable[_Row]:
    module = (paths[0] or "(the model)") if kind else "(no module)"
    if len(paths) > 1:
        module += f" and {len(paths) - 1} more"
    for (name, where), calls in operators.items():
        yield module, kind, name, where, str(calls.forward or ""), str(calls.backward or "")
        module = kind = ""  # shown once


def _where(given: Any, returned: Any) -> str:
    """Return ``cuda:0``; for a copy ``cpu -> cuda:0``; without tensors an empty string."""
    # A tensor of the CPU without dimensions may be combined with tensors of any device.
    arguments = list(tensors(given))
    source = {str(t.device) for t in arguments if t.dim()} or {str(t.device) for t in arguments}
    target = {str(t.device) for t in tensors(returned)}
    target = target or source
    if source <= target:
        return ", ".join(sorted(target))
    return f"{', '.join(sorted(source - target))} -> {', '.join(sorted(target))}"
