"""Spot checks on ranks: all ranks compute the same shard twice, between two updates."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

from quorate.data.source import Source
from quorate.engines.collective.rank_control import RankControl, Record
from quorate.engines.job import Task
from quorate.engines.spot_check import SpotCheck, SpotCheckResult
from quorate.replica.replica import Replica
from quorate.replica.streams import Stream
from quorate.training.collective.member import Member
from quorate.training.state import State

CHECK = "check"  # kind of the record after which all ranks call ``checked``


def ask(ranks: RankControl, member: Member, job: SpotCheck) -> Mapping[int, SpotCheckResult]:
    """Let all ranks compute a spot check; return the results by rank. Rank 0 calls. Blocks."""
    ranks.tell({"kind": CHECK, **job.options()})
    return checked(ranks, member, job)


def check_asked(
    record: Record, ranks: RankControl, member: Member, state: State, source: Source
) -> None:
    """Compute the spot check described in a record of rank 0. Blocks."""
    options: dict[str, Any] = {name: value for name, value in record.items() if name != "kind"}
    checked(ranks, member, SpotCheck(source, state.parameters, range(0), **options))


def checked(ranks: RankControl, member: Member, job: SpotCheck) -> dict[int, SpotCheckResult]:
    """Compute a spot check, and return the results by rank. All ranks call. Blocks.

    A rank with an error of user code has no result.
    """

    def at(phase: str) -> None:
        member.sheet.tell(phase, *job.ticket(0, 0))

    task = Task(ranks.rank, ranks.rank, 0, at=at)

    def computed(replica: Replica, stream: Stream) -> Any:
        with closing(job.feed()) as feed:
            (output,) = job.compute(replica, stream, feed, task).outputs
            return output.value

    try:
        own = member.beside(computed)
    except Exception:  # an error of user code is reported when training computes the shard
        own = None
    found = enumerate(ranks.gather(own))
    return {rank: SpotCheckResult.from_fields(fields) for rank, fields in found if fields}
