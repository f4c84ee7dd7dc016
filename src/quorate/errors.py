"""The exceptions of quorate, drawn as a tree.

::

    QuorateError
    ├── UserError            the user can mend it: one line, exit code 2
    │   ├── SettingError     an option: name, got, expected, what to do
    │   │   └── CopyError    a model that cannot be copied
    │   ├── DataError        a dataset or a file: where, got, expected
    │   ├── LossError        what the loss function returned
    │   ├── CompileError     what torch.compile cannot compile
    │   └── CheckpointError  a saved state that is damaged or does not fit
    │       └── MisfitError  one that is sound, and of another run
    ├── NotFiniteError       a loss or gradient that is no number, before it reaches the parameters
    ├── SameBitsError        a strict run that cannot have the same bits elsewhere
    ├── RunError             a run that a command started failed
    ├── WorkerError          workers ended, or raised what only they have a type for
    └── ProtocolError        a transport broke the coordinator's rules: a bug, with the last events

An exception raised by the user's own code is none of these: it reaches the caller as it is, with a
note (PEP 678) that says worker, step, shard and rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class QuorateError(Exception):
    """Whatever quorate itself raises."""


class UserError(QuorateError):
    """A mistake that the user can mend. The message is one line; commands exit with 2."""


class SettingError(UserError):
    """An option has a value that cannot work."""

    def __init__(self, name: str, got: object, expected: str, fix: str) -> None:
        super().__init__(f"{name}: got {got!r}, expected {expected}; {fix}")
        self.name = name


class CopyError(SettingError):
    """A model cannot be copied, and towers need a copy each."""


class DataError(UserError):
    """A dataset or a data file is not what it should be."""

    def __init__(
        self,
        where: str | Path,
        *,
        got: object,
        expected: object,
        offset: int | None = None,
        fix: str = "",
    ) -> None:
        at = "" if offset is None else f" at byte {offset:,}"
        cure = f"; {fix}" if fix else ""
        super().__init__(f"{where}{at}: got {got}, expected {expected}{cure}")
        self.where, self.got, self.expected = where, got, expected


class LossError(UserError):
    """The loss function returned something that cannot be trained on."""


class CompileError(UserError):
    """The loss function cannot be compiled with the model, or has to be compiled too often."""

    def __init__(self, why: str, fix: str = "leave compile off") -> None:
        super().__init__(f"compile: {why}; {fix}")
        self.why = why


class CheckpointError(UserError):
    """A saved state is damaged, or does not fit this model and these settings."""


class MisfitError(CheckpointError):
    """A saved state is sound, and of another run: no checkpoint of this one can be like it."""


class NotFiniteError(QuorateError):
    """A loss or a gradient is infinite or not a number; the update was not made."""


class SameBitsError(QuorateError):
    """A run that was asked to be strict came upon a reason why its bits are not the same."""


class RunError(QuorateError):
    """A run that a command started in a process of its own failed, by the script's doing."""


class WorkerError(QuorateError):
    """Workers ended and no more can be started, or user code raised an exception of its own."""


class ProtocolError(QuorateError):
    """An event that cannot happen in the coordinator's present state."""

    def __init__(self, message: str, events: Iterable[object]) -> None:
        trail = "\n".join(f"  {event}" for event in events)
        super().__init__(f"{message}\nlast events, oldest first:\n{trail}")
