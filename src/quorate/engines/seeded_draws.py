"""Random draws of user code outside shards: in an optimizer, or between two updates."""

from __future__ import annotations

from typing import Any, ClassVar

from quorate.coordination.plan import Plan
from quorate.replica.streams import Stream


def seeded_draws(what: str, plan: Plan, n: int) -> Stream:
    """Return a context in which this thread's draws from torch depend on the seed and n alone.

    Args:
        what: "update" for an optimizer with noise, "between" for callbacks and loop bodies.
        plan: has the seed.
        n: the number of updates.
    """
    try:
        stream = _SpareStream.spare.pop()  # another thread may have taken the last stream
    except IndexError:
        stream = _SpareStream()
    stream.reseed((what, plan.seed, n))
    return stream


class _SpareStream(Stream):
    """A stream for one block, and then for another: a new stream takes longer than the block."""

    spare: ClassVar[list[_SpareStream]] = []

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.spare.append(self)
