"""Moves: single actions of workers in memory, for the script of a test."""

from __future__ import annotations

from dataclasses import dataclass, field

from quorate.errors import QuorateError


class ScriptError(QuorateError, AssertionError):
    """A script that cannot be followed: a move is impossible, or nothing more will happen."""


@dataclass(frozen=True)
class Finishes:
    """A worker computes its current shard and finishes."""

    worker: int


@dataclass(frozen=True)
class Fails:
    """User code raises ``error`` on a worker, in its current shard."""

    worker: int
    error: BaseException = field(default_factory=lambda: RuntimeError("as the script says"))


@dataclass(frozen=True)
class LeavesOff:
    """A worker abandons its current shard, after the coordinator has canceled the shard."""

    worker: int


@dataclass(frozen=True)
class Leaves:
    """A worker disappears, as after a kill."""

    worker: int
    #: whether the worker crashed by itself: its shard may be the cause
    crashed: bool = False
    #: whether the results of open steps remain; otherwise they are lost
    results_stay: bool = False


@dataclass(frozen=True)
class Joins:
    """A worker joins: late, if this is its first move, or after it has left."""

    worker: int


@dataclass(frozen=True)
class Hangs:
    """A worker stops responding, until the coordinator replaces the worker."""

    worker: int


Move = Finishes | Fails | LeavesOff | Leaves | Joins | Hangs
