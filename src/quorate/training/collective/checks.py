"""Spot checks over ranks: all compute one and the same shard twice, between two updates."""

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

CHECK = "check"  # the kind of a record: all ranks call ``checked``


def ask(ranks: RankControl, member: Member, job: SpotCheck) -> Mapping[int, SpotCheckResult]:
    """Have all ranks compute a check, and return what they found. Rank 0 calls it. Blocks."""
    ranks.tell({"kind": CHECK, **job.options()})
    return checked(ranks, member, job)


def check_asked(
    record: Record, ranks: RankControl, member: Member, state: State, source: Source
) -> None:
    """Compute the check that a record of rank 0 asks for. Blocks."""
    options: dict[str, Any] = {name: value for name, value in record.items() if name != "kind"}
    checked(ranks, member, SpotCheck(source, state.parameters, range(0), **options))


def checked(ranks: RankControl, member: Member, job: SpotCheck) -> dict[int, SpotCheckResult]:
    """Compute a check, and return what each rank found that could. All ranks call it. Blocks."""

    def at(phase: str) -> None:
        member.sheet.tell(phase, *job.ticket(0, 0))

    task = Task(ranks.rank, ranks.rank, 0, at=at)

    def computed(replica: Replica, stream: Stream) -> Any:
        with closing(job.feed()) as feed:
            (output,) = job.compute(replica, stream, feed, task).outputs
            return output.value

    try:
        own = member.beside(computed)
    except Exception:  # of user code: in its shard it is reported
        own = None
    found = enumerate(ranks.gather(own))
    return {rank: SpotCheckResult.from_fields(fields) for rank, fields in found if fields}
