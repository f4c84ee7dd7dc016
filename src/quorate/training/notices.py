"""Notices: lines about the settings and code of a script, shown once for all fits.

A script may train many models, one per fold or trial, and each fit would show the same lines again.
Events of a single fit are no notices: the checkpoint resumed from, the checkpoints saved.
"""

from __future__ import annotations

from collections.abc import Callable

from quorate.coordination.run_event import hidden

_shown: set[str] = set()  # notices shown in this process


def is_new(notice: str) -> bool:
    """Return whether a notice is new in this process, and note it as shown."""
    if notice in _shown:
        return False
    _shown.add(notice)
    return True


def once(say: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that says a line, hidden if this process said the same line before.

    Each fit logs its notices in its own run directory.
    """

    def say_once(notice: str) -> None:
        say(notice if is_new(notice) else hidden(notice))

    return say_once


def forget() -> None:
    """Show every notice again: another script begins in this process, as in a test."""
    _shown.clear()
