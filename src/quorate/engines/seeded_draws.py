"""Random draws of user code outside shards: in an optimizer, or between two updates."""

from __future__ import annotations

from typing import Any, ClassVar

from quorate.coordination.plan import Plan
from quorate.replica.streams import Stream


class seeded_draws:  # noqa: N801
    """Within the block this thread's draws from torch depend on the seed and the update count.

    Args:
        what: "update" for an optimizer with noise, "between" for callbacks and loop bodies.
        plan: has the seed.
        n: the number of updates.
    """

    __slots__ = ("_stream",)
    _spare: ClassVar[list[Stream]] = []  # a new stream usually takes longer than the block

    def __init__(self, what: str, plan: Plan, n: int) -> None:
        try:
            self._stream = self._spare.pop()  # another thread may have taken the last stream
        except IndexError:
            self._stream = Stream()
        self._stream.reseed((what, plan.seed, n))

    def __enter__(self) -> None:
        self._stream.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._stream.__exit__(*raised)
        self._spare.append(self._stream)
