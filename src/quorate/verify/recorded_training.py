"""Training that is recorded: of each shard its rows, what modules return, and its gradient.

The first shard of a worker is computed twice before, so that what is not repeatable is found.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from quorate.feed import Batch, Source
from quorate.fingerprint import fingerprint
from quorate.flat import Flat
from quorate.job import Training, shard_seed
from quorate.replica import Phase, Replica
from quorate.shard_sum import ShardSum
from quorate.streams import Stream
from quorate.verify.module_trace import ModuleTrace
from quorate.verify.records import ShardRecord, note
from quorate.verify.twice import twice
from quorate.verify.values import tensor_text, value_hash


class RecordedTraining(Training):
    """As ``Training``, with the same bits.

    Args:
        folder: where records are written.
    """

    name = "recorded training"
    is_compared = False  # what would be refused is to be explained

    def __init__(
        self, source: Source, parameters: Flat, steps: range, *, folder: str, **options: Any
    ) -> None:
        super().__init__(source, parameters, steps, **options)
        source.hashes_samples = True
        self._folder = Path(folder)
        self._tried: set[int] = set()  # replicas that have computed a shard twice

    def options(self) -> dict[str, Any]:
        return {**super().options(), "folder": str(self._folder)}

    def _work(
        self,
        replica: Replica,
        batch: Batch,
        stream: Stream,
        step: int,
        shard: int,
        into: Flat | None,
        at: Phase,
    ) -> ShardSum:
        thread = threading.current_thread().name
        worker = int(thread.rpartition("-")[2])  # quorate-tower-1, quorate-worker-1
        if id(replica) not in self._tried:
            self._tried.add(id(replica))
            seed = shard_seed(self.plan, step, shard)
            found = twice(worker, replica, self.source, stream, (step, shard), seed)
            note(self._folder, thread, found)
        with ModuleTrace(replica.model) as trace, replica.watched(trace.watch):
            result = super()._work(replica, batch, stream, step, shard, into, at)
        assert result.gradient is not None
        record = ShardRecord(
            worker=worker,
            device=str(replica.device),
            step=step,
            shard=shard,
            rows=batch.rows.tolist(),
            samples=list(batch.samples),
            batch=fingerprint(batch.data),
            forward=trace.forward,
            backward=trace.backward,
            metrics={**result.metrics, "weight": result.weight},
            gradient={name: tensor_text(v) for name, v in result.gradient.views.items()},
            buffers=value_hash((result.buffers, result.counts)),
        )
        note(self._folder, thread, record)
        return result
