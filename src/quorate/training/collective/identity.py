"""What has to be the same on all ranks, before the first step."""

from __future__ import annotations

import json

from quorate.data.source import Source
from quorate.errors import UserError
from quorate.training.collective.member import Member
from quorate.training.crew import Crew
from quorate.training.optimizing.optimize import Optimize
from quorate.transports.fingerprints import data_fingerprint


def identity(member: Member, source: Source, crew: Crew) -> dict[str, str]:
    """Return what has to be the same on all ranks, in words and hashes."""
    workers, optimize = crew.recipe.workers, crew.recipe.optimize
    facts = {
        **crew.recipe.facts(),
        "exchange": workers.exchange,
        "bucket_mb": workers.bucket_mb,
        "shard_optimizer": isinstance(optimize, Optimize) and optimize.shard_optimizer,
    }
    return {
        **{name: repr(value) for name, value in facts.items()},
        "the first rows of the dataset": data_fingerprint(source),
        "the gradient of the first shard": member.fingerprint(),
    }


def compare(given: list[bytes]) -> None:
    """Compare what each rank gave, by rank.

    Raises:
        UserError: one differs from rank 0.
    """
    first, *others = (json.loads(text) for text in given)
    for rank, other in enumerate(others, start=1):
        for name, value in first.items():
            if other[name] != value:
                raise UserError(
                    f"rank {rank} differs from rank 0 in {name}: got {other[name]:.40}, expected "
                    f"{value:.40}; start the same script with the same arguments, data and "
                    "packages on every rank"
                )
