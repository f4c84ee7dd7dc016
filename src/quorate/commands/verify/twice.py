"""Repeatability: a shard loaded and computed twice by the same worker must give equal results."""

from __future__ import annotations

from collections.abc import Sequence

from quorate.commands.verify.records import TwiceRecord
from quorate.data.source import Batch, Source, Ticket
from quorate.replica.fingerprint import fingerprint
from quorate.replica.replica import Replica
from quorate.replica.streams import Stream
from quorate.replica.witness.calls import culprit, paired
from quorate.replica.witness.operator_trace import traced


def twice(
    worker: int,
    replica: Replica,
    source: Source,
    stream: Stream,
    ticket: Ticket,
    seed: int,
    trained_on: Sequence[str],
) -> TwiceRecord:
    """Load a shard twice, and compute the shard twice from the same rows. Restores the replica.

    Args:
        source: must hash samples.
        stream: the calling thread's stream.
        seed: seed of the shard.
        trained_on: hashes of the rows as loaded for training, usually after another shard: a
            dataset with memory may be repeatable from its second answer on.
    """
    batches = [source.load(ticket) for _ in range(2)]
    loads = [trained_on, *(batch.samples for batch in batches)]
    changed = changed_rows(batches[0].rows.tolist(), loads)
    hashes = [fingerprint(batch.data) for batch in batches]
    (calls, once), (calls_again, again) = (
        traced(replica, batches[0].data, stream, seed, fill) for fill in range(2)
    )
    results = paired(once, again)
    return TwiceRecord(
        worker=worker,
        device=str(replica.device),
        step=ticket[0],
        shard=ticket[1],
        rows=changed,
        operators=len(calls),
        differs=[name for name, (text, changed_text) in results.items() if text != changed_text],
        call=culprit(calls, calls_again, results),
        calls=calls,
        results=once,
        batch_differs=not changed and hashes[0] != hashes[1],
    )


def loaded_again(
    worker: int, device: str, source: Source, ticket: Ticket, batch: Batch
) -> TwiceRecord | None:
    """Load a computed shard of a later step once more; None if its rows are the same.

    Args:
        batch: the computed batch, whose rows were loaded after other rows.
    """
    loads = [batch.samples, source.load(ticket).samples]
    rows = changed_rows(batch.rows.tolist(), loads)
    if not rows:
        return None
    step, shard = ticket
    return TwiceRecord(worker, device, step, shard, rows, operators=0, differs=[], call=None)


def changed_rows(rows: Sequence[int], loads: Sequence[Sequence[str]]) -> list[int]:
    """Return the rows whose content differed between loads of a shard.

    Args:
        loads: hashes of the rows of each load, in the order of the rows.
    """
    return [row for row, *texts in zip(rows, *loads, strict=True) if len(set(texts)) > 1]
