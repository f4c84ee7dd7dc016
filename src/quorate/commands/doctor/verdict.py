"""A verdict: one thing that is wrong, and what helps."""

from __future__ import annotations

from typing import NamedTuple

FAILS, BEWARE = "fails", "beware"


class Verdict(NamedTuple):
    """One thing that is wrong."""

    level: str  # FAILS: such a run would fail or hang; BEWARE: it would not do what one may expect
    subject: str
    what: str  # with the figure
    cure: str
