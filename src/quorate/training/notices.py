"""Notices: what a script is told about its settings and its code, once however many fits it has.

A script may train many models, one per fold or trial, and each fit would say the same again. What
reports an event of one fit is no notice: where it was resumed from, what was saved.
"""

from __future__ import annotations

from collections.abc import Callable

from quorate.coordination.run_event import hidden

_shown: set[str] = set()  # in this process


def is_new(notice: str) -> bool:
    """Return whether a notice was not shown before in this process; from now on it was."""
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
