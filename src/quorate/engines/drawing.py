"""Draws of user code that runs in no shard: in an optimizer, between two updates."""

from __future__ import annotations

from typing import Any, ClassVar

from quorate.coordination.plan import Plan
from quorate.replica.streams import Stream


class drawing:  # noqa: N801
    """Within the block this thread's draws from torch are keyed by the number of updates.

    Args:
        what: "update": an optimizer that adds noise, say; "between": callbacks, a loop's body.
    """

    __slots__ = ("_stream",)
    _spare: ClassVar[list[Stream]] = []  # a new one takes longer than the block, as a rule

    def __init__(self, what: str, plan: Plan, n: int) -> None:
        try:
            self._stream = self._spare.pop()  # any thread may be first
        except IndexError:
            self._stream = Stream()
        self._stream.reseed((what, plan.seed, n))

    def __enter__(self) -> None:
        self._stream.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._stream.__exit__(*raised)
        self._spare.append(self._stream)
