"""Moves: what a script lets workers in memory do, one at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

from quorate.errors import QuorateError


class ScriptError(QuorateError, AssertionError):
    """A script that cannot be played: a move is impossible, or nothing will happen any more."""


@dataclass(frozen=True)
class Finishes:
    """A worker is done with its shard, which is computed at this moment."""

    worker: int


@dataclass(frozen=True)
class Fails:
    """User code raises on a worker, in the shard that it has."""

    worker: int
    error: BaseException = field(default_factory=lambda: RuntimeError("as the script says"))


@dataclass(frozen=True)
class LeavesOff:
    """A worker leaves off its shard, as it was told to."""

    worker: int


@dataclass(frozen=True)
class Leaves:
    """A worker is gone, as if it had been killed."""

    worker: int
    crashed: bool = False  # by its own doing: what it was computing may be to blame
    results_stay: bool = False  # else whatever it had computed of open steps goes with it


@dataclass(frozen=True)
class Joins:
    """A worker is there: late, if this is its first move; or again."""

    worker: int


@dataclass(frozen=True)
class Hangs:
    """A worker does not answer any more, until it is ended and another takes its number."""

    worker: int


Move = Finishes | Fails | LeavesOff | Leaves | Joins | Hangs
