"""What is to be done about the members of a crew of worker processes. Pure.

``supervisor.py`` decides; ``transport.py`` carries out, in order, and reports what came of it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Start:
    """Start a process of the member; report ``started`` or ``cannot_start``."""

    member: int


@dataclass(frozen=True)
class Welcome:
    """Hand over the shared memory."""

    member: int


@dataclass(frozen=True)
class Ask:
    """Ask the member to join a job; it answers that it is ready."""

    member: int
    job: int


@dataclass(frozen=True)
class Close:
    """Tell the member that a job is over, which it was asked to join."""

    member: int
    job: int


@dataclass(frozen=True)
class Join:
    """Report to a job that the member takes part in it from now on."""

    member: int
    job: int


@dataclass(frozen=True)
class Leave:
    """Report to a job that the member, which had joined, is gone."""

    member: int
    job: int
    reason: str
    crashed: bool  # by its own doing, and not by a kill


@dataclass(frozen=True)
class Kill:
    """Kill the member's process, which may have ended."""

    member: int


@dataclass(frozen=True)
class AwaitEnd:
    """Wait a moment for the process to end; report ``exited`` or ``still_there``."""

    member: int


@dataclass(frozen=True)
class Release:
    """Close all that belonged to the member's process, which has ended."""

    member: int


@dataclass(frozen=True)
class Say:
    """Show a line to the user."""

    line: str


@dataclass(frozen=True)
class Fail:
    """End the run with an error."""

    error: BaseException


Decision = Start | Welcome | Ask | Close | Join | Leave | Kill | AwaitEnd | Release | Say | Fail
