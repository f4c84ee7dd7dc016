"""One shard, loaded and computed twice by the same worker: is it the same the second time?"""

from __future__ import annotations

from quorate.commands.verify.calls import culprit, paired
from quorate.commands.verify.operator_trace import OperatorTrace
from quorate.commands.verify.records import Call, TwiceRecord
from quorate.commands.verify.values import tensor_text
from quorate.data.source import Batch, Source, Ticket
from quorate.replica.fingerprint import fingerprint
from quorate.replica.replica import Replica
from quorate.replica.streams import Stream


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
    traces = [_computed(replica, batches[0], stream, seed, fill) for fill in range(2)]
    (calls, once), (calls_again, again) = traces
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


def _computed(
    replica: Replica, batch: Batch, stream: Stream, seed: int, fill: int
) -> tuple[list[Call], dict[str, str]]:
    """Return the calls of operators, and the results: metrics, gradient by parameter, loss."""
    trace = OperatorTrace(replica.model, stream, fill)
    with replica.watched(trace.watch), trace:
        # Of weight 1: what is handed over is what autograd made, by which calls are found.
        result = replica.gradient(batch.data, 1, stream, seed, at=trace.phase)
    assert result.gradient is not None
    results = {name: repr(value) for name, value in result.metrics.items()}
    results |= {name: tensor_text(view) for name, view in result.gradient.views.items()}
    results |= {f"loss function {n}": text for n, text in enumerate(trace.returned)}
    replica.recycle(result)
    return trace.calls, results
