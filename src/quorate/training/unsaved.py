"""State of callbacks outside of checkpoints: a resume would lose such state silently.

A callback with a ``state_dict`` chooses itself what is saved. The attributes of all further
callbacks are compared during training, by bounded hashes: a schedule in an attribute would begin
anew after a resume.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType

from quorate.replica.witness.kept import ObjectAttribute, kept_in
from quorate.training.callbacks import Callback, defines
from quorate.training.optimizing.attributes import optimizers
from quorate.training.state import State

_CLOCKS: tuple[Callable[[], float], ...] = (time.time, time.monotonic, time.perf_counter)


class UnsavedAttributes:
    """A detector of callback attributes that change and are not saved; notes each once.

    Args:
        callbacks: callbacks of the run.
        state: the trained state.
    """

    def __init__(self, callbacks: Iterable[Callback], state: State) -> None:
        self._callbacks = [each for each in callbacks if not defines(each, "state_dict")]
        self._state = state
        self._begun = [clock() for clock in _CLOCKS]
        self._updates = 0
        self._known: Mapping[str, ObjectAttribute] = {}

    def updated(self, *, is_last: bool) -> None:
        """Compare attributes after an update, when all callbacks have been called.

        The first update is skipped: callbacks set themselves up. Then attributes are compared at
        updates 2, 4, 8, ... and at the last: comparisons are few, and the first comes soon.
        """
        self._updates += 1
        if not self._callbacks or not (self._updates & (self._updates - 1) == 0 or is_last):
            return
        now: dict[str, ObjectAttribute] = {}
        for callback in self._callbacks:
            kind = type(callback).__name__
            attributes = {
                f"{kind}.{name}": value
                for name, value in vars(callback).items()
                if not (self._is_time(value) or self._is_global_step(callback, value))
            }
            now |= kept_in(attributes, self._state.model, self._carried())
        if self._updates > 1:
            for name in [each for each in now if each in self._known]:  # new ones are made late
                before, after = self._known[name], now[name]
                if before.hashed != after.hashed:
                    self._note(name, is_doubt=before.states != after.states)
        self._known = now

    def _note(self, name: str, *, is_doubt: bool) -> None:
        kind = name.partition(".")[0]
        line = (
            f"{name} of a callback changes during training, and no checkpoint saves it: after a "
            f"resume it has its first value; give {kind} a state_dict() and a load_state_dict()"
        )
        if is_doubt:  # a schedule or a generator: training depends on it
            self._state.notes.doubt(line)
        else:
            self._state.notes.add(line)

    def _carried(self) -> dict[int, str]:
        """Return objects already saved in checkpoints, by ``id``."""
        carried: dict[int, str] = {}
        state = self._state
        scheduled = [one for each in state.phases.updates.values() for one in each.scheduled]
        carried |= {id(each.scheduler): "a schedule" for each in scheduled if each.scheduler}
        for optimizer in (
            one for each in scheduled for one in optimizers(each.optimizer.user_optimizer)
        ):
            carried[id(optimizer)] = "an optimizer"
            carried |= {id(optimizer.state): "its state", id(optimizer.param_groups): "groups"}
            carried |= {id(group): "a group" for group in optimizer.param_groups}
        return carried

    def _is_time(self, value: object) -> bool:
        """Return whether a value is a clock time of this run, useless after a resume."""
        return isinstance(value, float) and any(
            begun <= value <= clock() for begun, clock in zip(self._begun, _CLOCKS, strict=True)
        )

    def _is_global_step(self, callback: Callback, value: object) -> bool:
        """Return whether a value is a copy of ``global_step``, and no counter of its own."""
        return type(value) is int and value == self._state.global_step and _names_step(callback)


def _names_step(callback: Callback) -> bool:
    """Return whether a method of a callback reads ``global_step`` of a report or the trainer."""
    methods = [method for kind in type(callback).__mro__ for method in vars(kind).values()]
    return any(
        "global_step" in method.__code__.co_names
        for method in methods
        if isinstance(method, FunctionType)
    )
