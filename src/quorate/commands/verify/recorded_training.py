"""Recorded training: records each shard's rows, module outputs and gradient.

A replica in stages trains through its stages. Its shards are also computed in one piece: this
computation is recorded, and the results of the stages must be equal to it.

Before training, a worker computes its shards of the first step twice, to detect code that is not
repeatable. In each later step one shard is loaded twice: rows may be repeatable only until a row is
loaded for the second time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from quorate.commands.verify.records import ShardRecord, TwiceRecord, note
from quorate.commands.verify.twice import loaded_again, twice
from quorate.coordination.tree import TreeSum
from quorate.data.feed import Feed
from quorate.data.source import Batch
from quorate.engines.job import PassWithTotals, Task, Training, shard_seed
from quorate.engines.stages.pipelined_replica import PipelinedReplica, other_gradient, other_outcome
from quorate.replica.fingerprint import fingerprint
from quorate.replica.replica import Replica
from quorate.replica.shard_sum import ShardSum
from quorate.replica.streams import Stream
from quorate.replica.witness.module_trace import ModuleTrace
from quorate.replica.witness.values import tensor_text, value_hash
from quorate.training.batch_loss import BackThrough, Representing

WORD_S = 0.5  # seconds until a worker receives the cancellation of a shard
MOST_TWICE = 4  # shards computed twice per worker: each takes as long as some updates


@dataclass(eq=False, kw_only=True)
class RecordedTraining(Training):
    """A ``Training`` that also records, with the same bits.

    Args:
        folder: folder for the records.
    """

    name = "recorded training"
    is_compared = False  # model changes must be explained, not refused

    sent = (*Training.sent, "folder")

    folder: str

    def __post_init__(self) -> None:
        super().__post_init__()
        self.source.hashes_samples = True
        self._folder = Path(self.folder)
        self._tried: Counter[int] = Counter()  # number of shards computed twice, by replica
        self._twice_in = self.steps.start
        self._again_in: dict[int, int] = {}  # the last step with a repeated load, by replica

    def _in_stages(
        self,
        replica: PipelinedReplica,
        stream: Stream,
        tasks: Sequence[Task],
        batches: Sequence[Batch],
    ) -> list[ShardSum]:
        """Train through the stages, and compute and record the same shards in one piece.

        Differences between stages and one piece are recorded. Both use the same parameters, unless
        an update was made meanwhile, because another worker was faster with the same shards.
        """
        loaded = [fingerprint(batch.data) for batch in batches]
        before = value_hash(self.parameters.vectors)
        results = super()._in_stages(replica, stream, tasks, batches)
        if any(result.awaits_totals for result in results):  # recorded in the second pass
            return results
        try:
            outcomes, gradients = [], []
            tree = TreeSum[ShardSum](self.plan.shards_of(tasks[0].step), ShardSum.add)
            for task, batch, text, through in zip(tasks, batches, loaded, results, strict=True):
                replica.loss_call.place(self.plan, task.step, batch.rows)
                anew = batch._replace(data=self._reloaded(task))
                whole = self._recorded(
                    replica, anew, stream, structs.replace(task, into=None), text
                )
                if other := other_outcome(whole, through):
                    outcomes.append(other)
                tree.put((0, task.shard), whole)
            for (level, index), whole in tree.parts.items():
                summed = results[(index << level) - tasks[0].shard]
                assert whole.gradient is not None
                assert summed.gradient is not None
                if other := other_gradient(whole.gradient, summed.gradient):
                    gradients.append(other)
            differs = [*dict.fromkeys(gradients + outcomes)]
            if differs and value_hash(self.parameters.vectors) == before:
                worker, step, shard = tasks[0].worker, tasks[0].step, tasks[0].shard
                found = TwiceRecord(worker, str(replica.group), step, shard, [], 0, differs, None)
                note(self._folder, f"worker-{worker}", replace(found, in_stages=len(tasks)))
        except BaseException:
            for result in results:
                replica.recycle(result)
            raise
        return results

    def _work(self, replica: Replica, batch: Batch, stream: Stream, task: Task) -> ShardSum:
        return self._recorded(replica, batch, stream, task)

    def _recorded(
        self,
        replica: Replica,
        batch: Batch,
        stream: Stream,
        task: Task,
        loaded: str | None = None,
    ) -> ShardSum:
        """Compute a shard, and record the results.

        Args:
            loaded: a hash of the batch from its first load; None: of this batch.
        """
        worker, step, shard, into, at = task.worker, task.step, task.shard, task.into, task.at
        writer = f"worker-{worker}"
        if step == self._twice_in and self._tried[id(replica)] < MOST_TWICE:
            self._tried[id(replica)] += 1
            seed = shard_seed(self.plan, step, shard)
            before = value_hash(self.parameters.vectors)
            twice_record = twice(
                worker, replica, self.source, stream, (step, shard), seed, batch.samples
            )
            if value_hash(self.parameters.vectors) != before:
                # Another worker was faster with this shard, and the update is made: the
                # cancellation is on its way. Or the model changes its parameters itself.
                time.sleep(WORD_S)
            at("forward")
            note(self._folder, writer, twice_record)
        loaded = loaded or fingerprint(batch.data)  # before user code can change the batch
        with ModuleTrace(replica.model) as trace, replica.watched(trace.watch):
            result = super()._work(replica, batch, stream, task)
        if result.awaits_totals:  # recorded in the second pass
            return result
        if replica.is_compiled:  # traced without compilation, but trained with it
            if into is None:
                replica.recycle(result)
            batch = batch._replace(data=self._reloaded(task))
            result = super()._work(replica, batch, stream, task)
        assert result.gradient is not None
        record = ShardRecord(
            worker=worker,
            device=str(replica.device),
            step=step,
            shard=shard,
            rows=batch.rows.tolist(),
            samples=list(batch.samples),
            batch=loaded,
            forward=trace.forward,
            backward=trace.backward,
            metrics={**result.metrics, "weight": result.weight},
            gradient={name: tensor_text(v) for name, v in result.gradient.named.items()},
            buffers=value_hash((result.buffers, result.integer_buffers)),
        )
        note(self._folder, writer, record)
        self._look_at_rows(replica, batch, task)
        return result

    def _look_at_rows(self, replica: Replica, batch: Batch, task: Task) -> None:
        """Load a replica's first shard of a later step once more."""
        if task.step == self._twice_in or self._again_in.get(id(replica)) == task.step:
            return
        self._again_in[id(replica)] = task.step
        ticket = (task.step, task.shard)
        found = loaded_again(task.worker, str(replica.device), self.source, ticket, batch)
        if found is not None:
            note(self._folder, f"worker-{task.worker}", found)


class RecordedRepresenting(Representing):
    """A ``Representing`` pass, not recorded: the records of a step come from its second pass."""

    name = RecordedTraining.name
    is_compared = False


@dataclass(eq=False, kw_only=True)
class RecordedBackThrough(RecordedTraining, BackThrough):
    """The recorded second pass of a step with a loss over the whole batch.

    Args:
        first: the step whose shards are computed twice.
        options: see ``RecordedTraining`` and ``BackThrough``.
    """

    sent = (*RecordedTraining.sent, "first")

    first: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._twice_in = self.first

    def _fetched(self, replica: Replica, feed: Feed, task: Task) -> Batch:
        replica.transfers.kept.clear()  # load again: the first pass has hashed no samples
        return super()._fetched(replica, feed, task)


@dataclass(eq=False, kw_only=True)
class RecordedPassWithTotals(RecordedTraining, PassWithTotals):
    """The recorded second pass of a step whose loss has terms with totals of their own."""

    sent = (*RecordedTraining.sent, "scales")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._twice_in = -1  # the first pass has computed shards twice
