"""The structure of a model: the modules within each module, and their hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import methodcaller

import torch

_HOOKS = sorted(name for name in vars(torch.nn.Module()) if name.endswith(("_hooks", "_pre_hooks")))

_VALUES = methodcaller("values")


class ModuleTables:
    """Tables of modules and of hooks, compared in one pass."""

    def __init__(self, modules: Sequence[tuple[str, torch.nn.Module]]) -> None:
        own = [vars(module) for _, module in modules]
        self._within = [have["_modules"] for have in own if "_modules" in have]
        self._hooks = [have[name] for have in own for name in _HOOKS if name in have]

    def outline(self) -> tuple[list[int], list[int]]:
        """Return the ids of modules within each module, and the number of hooks of each kind."""
        within = chain.from_iterable(map(_VALUES, self._within))
        return [*map(id, within)], [*map(len, self._hooks)]


def built(module: torch.nn.Module) -> tuple[list[object], list[list[object]]]:
    """Return the modules within a module, and its hooks."""
    own = vars(module)
    modules, *hooks = (own.get(name) for name in ("_modules", *_HOOKS))
    listed = [[*table.values()] if isinstance(table, Mapping) else [] for table in hooks]
    return [*modules.values()] if isinstance(modules, Mapping) else [], listed
