"""Fingerprints: hashes to compare processes before the processes compute together."""

from __future__ import annotations

from quorate.coordination.keys import key
from quorate.data.source import Source
from quorate.replica.fingerprint import fingerprint
from quorate.replica.replica import Replica
from quorate.replica.streams import Stream


def data_fingerprint(source: Source) -> str:
    """Return a hash over the rows of shard 0 of step 0, equal in processes with the same data."""
    return fingerprint(source.load((0, 0)).data)


def probe_fingerprint(replica: Replica, source: Source, stream: Stream) -> str:
    """Return a hash over the sums of shard 0 of step 0, equal in processes with the same model."""
    batch = source.load((0, 0))
    seed = key("probe", source.plan.seed)
    replica.called.place(source.plan, 0, batch.rows, of_phase=False)
    result = replica.gradient(batch.data, len(batch.rows), stream, seed)
    assert result.gradient is not None
    gradient = (result.gradient.vectors, result.gradient.rows)
    return fingerprint(
        (result.weight, result.metrics, *gradient, result.buffers, result.integer_buffers)
    )
