"""A verdict: a problem and the remedy."""

from __future__ import annotations

from typing import NamedTuple

FAILS, BEWARE = "fails", "beware"


class Verdict(NamedTuple):
    """A problem and its remedy."""

    level: str  # FAILS: such a run would fail or hang; BEWARE: the run would surprise the user
    subject: str
    what: str  # with the figure
    cure: str
