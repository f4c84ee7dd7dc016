"""States of an optimizer on several ranks, gathered when user code reads the states.

Each rank of a collective has the state of its slice. A callback to read or scale momenta still
finds all of them, as in a loop of plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from quorate.training.optimizing.known_optimizers import States


class LentStates(States):
    """The states of an optimizer that holds a part of them; every access gathers all states first.

    Args:
        of: see ``States``.
        lend: called before each access.
    """

    def __init__(
        self, of: Callable[[object], dict[str, Any] | None], lend: Callable[[], None]
    ) -> None:
        super().__init__(of)
        self._lend = lend


def _lending(name: str) -> Callable[..., Any]:
    method = getattr(States, name)

    @wraps(method)
    def look(self: LentStates, *values: Any, **named: Any) -> Any:
        self._lend()
        return method(self, *values, **named)

    return look


for _name in (
    *("__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__"),
    *("get", "pop", "popitem", "setdefault", "update", "clear", "keys", "values", "items"),
):
    setattr(LentStates, _name, _lending(_name))
