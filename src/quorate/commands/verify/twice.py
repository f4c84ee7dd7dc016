"""One shard, loaded and computed twice by the same worker: is it the same the second time?"""

from __future__ import annotations

from quorate.commands.verify.records import TwiceRecord
from quorate.data.source import Source, Ticket
from quorate.replica.fingerprint import fingerprint
from quorate.replica.replica import Replica
from quorate.replica.streams import Stream
from quorate.replica.witness.calls import culprit, paired
from quorate.replica.witness.operator_trace import traced


def twice(
    worker: int, replica: Replica, source: Source, stream: Stream, ticket: Ticket, seed: int
) -> TwiceRecord:
    """Load a shard twice, and compute it twice from the same rows. The replica is as before.

    Args:
        source: hashes samples.
        stream: the calling thread's.
        seed: of the shard.
    """
    batches = [source.load(ticket) for _ in range(2)]
    rows = batches[0].rows.tolist()
    pairs = zip(rows, *(batch.samples for batch in batches), strict=True)
    changed = [row for row, text, again in pairs if text != again]
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
