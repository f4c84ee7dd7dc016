"""The identity of a rank: the facts required to be equal on all ranks before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quorate.data.source import Source
from quorate.engines.collective.rank_facts import require_same
from quorate.engines.job import data_fingerprint
from quorate.replica.witness.kept import changed, kept
from quorate.training.collective.rank_worker import RankWorker
from quorate.training.worker_group import WorkerGroup

_KEPT = "kept"  # not compared: explains a difference in a compared fact
MOST_NAMED = 3


def identity(worker: RankWorker, source: Source, workers: WorkerGroup) -> dict[str, Any]:
    """Return the facts that must be equal on all ranks, as text and hashes."""
    settings, optimize = workers.config.workers, workers.config.optimize
    facts = {
        **workers.config.facts(),
        "exchange": settings.exchange,
        "bucket_mb": settings.bucket_mb,
        "shard_optimizer": None in optimize and optimize[None].shard_optimizer,
    }
    return {
        **{name: repr(value) for name, value in facts.items()},
        "the first rows of the dataset": data_fingerprint(source),
        "the gradient of the first shard": worker.fingerprint(),
        _KEPT: kept(workers.model, workers.config.loss),
    }


def compare(given: list[dict[str, Any]], reads: Sequence[str] = ()) -> None:
    """Compare the identities of all ranks.

    Args:
        given: the identity of each rank, by rank.
        reads: lines about user code that reads values different on each rank.

    Raises:
        UserError: a rank differs from rank 0.
    """
    fix = "start the same script with the same arguments, data and packages on every rank"
    for name in given[0]:
        if name != _KEPT:
            values = [each[name] for each in given]
            require_same(name, values, fix, lambda rank: _why(given[0], given[rank], reads))


def _why(first: dict[str, Any], other: dict[str, Any], reads: Sequence[str]) -> str:
    """Return why a rank may differ from rank 0, in words; an empty text for no known reason."""
    names = changed(first[_KEPT], other[_KEPT])
    if not names:
        return f"; {reads[0]}" if reads else ""
    return f", where {', '.join(names[:MOST_NAMED])} {'is' if len(names) == 1 else 'are'} another"
