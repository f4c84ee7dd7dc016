"""Jobs of a loss over the whole batch: representations first, then gradients through shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from quorate.coordination.keys import key
from quorate.data.source import Batch
from quorate.engines.job import Evaluation, PassOverKeptRows, Task, Training, shard_seed
from quorate.replica.replica import Replica
from quorate.replica.shard_sum import ShardSum
from quorate.replica.streams import Stream
from quorate.replica.whole_batch.gather import Gather, SecondInput
from quorate.replica.whole_batch.represented import Tensors


class Representing(Training):
    """A job for the representations of shards; a batch of a single shard yields its gradient."""

    def has_gradients(self, step: int) -> bool:
        """Return whether the step has one shard."""
        return self.plan.shards_of(step) == 1

    def _work(self, replica: Replica, batch: Batch, stream: Stream, task: Task) -> ShardSum:
        if self.has_gradients(task.step):
            return super()._work(replica, batch, stream, task)
        task.at("forward")
        gather, rows = _gather(replica), len(batch.rows)
        seed = shard_seed(self.plan, task.step, task.shard)
        # Without ``reload``: user code receives copies, and the rows stay unchanged.
        result = gather.represented(replica, batch.data, rows, stream, seed, training=True)
        replica.transfers.keep((task.step, task.shard), batch)
        return result


@dataclass(eq=False, kw_only=True)
class BackThrough(PassOverKeptRows):
    """A job for a step's gradients, from gradients with respect to the representations of shards.

    Args:
        gradients: gradients by shard, in the coordinator's process alone. A worker of another
            process receives them with the shard.
    """

    gradients: Mapping[int, Tensors] = field(default_factory=dict)

    def beside(self, step: int, shard: int) -> Tensors | None:  # noqa: ARG002
        """Return the gradient with respect to the representations of a shard."""
        return self.gradients.get(shard)

    def _work(self, replica: Replica, batch: Batch, stream: Stream, task: Task) -> ShardSum:
        gradients = task.beside or self.beside(task.step, task.shard)
        assert gradients is not None
        return replica.gradient(
            SecondInput(batch.data, gradients),
            len(batch.rows),
            stream,
            shard_seed(self.plan, task.step, task.shard),
            into=task.into,
            at=task.at,
            reload=lambda: SecondInput(self._reloaded(task), gradients),
        )


class RepresentingInEvaluation(Evaluation):
    """A job for the representations of shards in evaluation mode."""

    def _work(self, replica: Replica, batch: Batch, stream: Stream, task: Task) -> ShardSum:
        task.at("forward")
        seed = key("evaluation", self.plan.seed, task.step, task.shard)
        return _gather(replica).represented(
            replica,
            batch.data,
            len(batch.rows),
            stream,
            seed,
            training=False,
            reload=partial(self._reloaded, task),
        )


def _gather(replica: Replica) -> Gather:
    loss = replica.plain_loss
    assert isinstance(loss, Gather)
    return loss
