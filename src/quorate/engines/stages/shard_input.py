"""The input of a pipelined replica: the shards of a run, and the rows sent to the stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from quorate.replica.beside.at import At
from quorate.replica.flat import Flat
from quorate.replica.replica import Phase


def no_stage(_stage: int) -> None:
    """Ignore a late stage."""


class MicroBatch(NamedTuple):
    """The rows of one shard, as sent to each stage."""

    data: Any  # on the host
    at: At  # the position of the rows in the run
    rows: int
    seed: int


class ShardInput(NamedTuple):
    """One shard of a run, for a pipelined replica."""

    shard: int  # its number in its step
    batch: MicroBatch
    into: Flat | None  # as for ``Replica.gradient``
    on_phase: Phase
    waits_for: Callable[[int], None] = no_stage  # called with a stage that takes long
