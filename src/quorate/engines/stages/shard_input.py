"""What a pipelined replica is given: the shards of a run, each with what its stages are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from quorate.replica.beside.at import NOWHERE, At
from quorate.replica.flat import Flat
from quorate.replica.replica import Phase


def no_stage(_stage: int) -> None:
    """Tell nobody."""


class ShardRows(NamedTuple):
    """What a loss function is given of a shard."""

    data: Any
    at: At = NOWHERE


class ShardInput(NamedTuple):
    """One shard of a run, for a pipelined replica."""

    shard: int  # its number in its step
    batch: ShardRows
    rows: int
    seed: int
    into: Flat | None  # as for ``Replica.gradient``
    at: Phase
    waits_for: Callable[[int], None] = no_stage  # told a stage that takes long
