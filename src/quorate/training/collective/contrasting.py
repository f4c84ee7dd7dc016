"""The loss over a whole batch on ranks: rank 0 computes the loss from all representations.

    each rank    forward of the rank's shards                      RankWorker._represented
    to rank 0    all representations
    rank 0       loss of all rows, gradient by representations     Contrast
    from rank 0  to each rank, the gradient by representations of the rank's shards;
                 to all ranks, the loss and the loss's own gradient by parameters
    each rank    forward again, backward from the received gradient; the usual exchange

Rank 0 alone computes the loss: state that user code keeps beside the model, and that callbacks
change, exists on rank 0 only. And the representations of a batch cross the network only once, as
do their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from quorate.coordination.plan import Plan
from quorate.coordination.tree import tree_sum
from quorate.engines.collective.rank_control import RankControl
from quorate.engines.partition import Partition
from quorate.errors import RankError
from quorate.replica.flat import Flat
from quorate.replica.loss import LossResult
from quorate.replica.loss_terms import Denominators
from quorate.replica.shard_sum import Part, ShardSum
from quorate.replica.streams import Stream
from quorate.replica.whole_batch.represented import Represented, Tensors
from quorate.training.optimizing.entries import in_memory_order
from quorate.training.second_pass import at_root
from quorate.training.whole_batch.contrasted import Contrast, Contrasted
from quorate.training.whole_batch.whole_batch import of_shards, weighted, with_loss

T = TypeVar("T")


class Through(NamedTuple):
    """The input of a rank's second pass over a step, with the loss to add to the step's sum."""

    gradients: dict[int, Tensors]  # by shard of this rank, by representations of the shard
    contrasted: Contrasted  # without the gradients by shard
    rows: int  # of the batch

    def add_to(self, own: Flat, partition: Partition, rank: int) -> None:
        """Add the loss's own gradient by parameters to a rank's slices of the sum."""
        for piece in partition.pieces(rank):
            gradient = self.contrasted.of_parameters.get(piece.name)
            if gradient is not None:
                section = partition.whole.sections[piece.name]
                values = gradient.new_empty_strided(section.shape, section.stride)
                values.copy_(weighted(gradient, self.rows))
                part = in_memory_order(values)[piece.start : piece.stop]
                own.views[piece.key].add_(part.to(own.device))

    def made_whole(self, parts: Sequence[Part], shards: int) -> list[Part]:
        """Return the sum of a step as its only part, with the loss of the whole batch."""
        total = tree_sum(parts, shards, ShardSum.add)
        return at_root(with_loss(total, self.contrasted), shards)


class Contrasting:
    """The part of this rank in the computation of the loss over a batch.

    Args:
        ranks: the connections to all ranks.
        plan: the plan of the loop.
        contrast: computes the loss; called on rank 0 alone.
    """

    def __init__(self, ranks: RankControl, plan: Plan, contrast: Contrast) -> None:
        self._ranks, self._plan, self._contrast = ranks, plan, contrast

    def __call__(
        self,
        step: int,
        shards: range,
        represent: Callable[[int, range, Stream], list[Represented]],
        beside: Callable[..., Any],
    ) -> Through:
        """Return the input of the second pass over a step. All ranks call. Blocks.

        Args:
            shards: the shards of this rank.
            represent: computes the representations of shards.
            beside: runs user code in the thread that computes shards: ``RankWorker.beside``.

        Raises:
            RankError: another rank is lost.
            Exception: the error of the lowest rank with an error; the same on all ranks.
        """
        # 1. Forward; each rank sends rank 0 the representations of its shards.
        own = _or_error(lambda: beside(lambda _, stream: represent(step, shards, stream)))
        found = self._ranks.collect([*shards, own])
        for *_, theirs in found:
            if isinstance(theirs, BaseException):
                raise theirs
        # 2. Rank 0 computes the loss, and sends each rank the gradients of its shards.
        dealt = self._ranks.deal(self._lead(step, found, beside) if self._ranks.leads else ())
        if isinstance(dealt, BaseException):
            raise dealt
        metrics, weight, totals, denominators, of_parameters, own_gradients = dealt
        outcome = LossResult(torch.tensor(metrics["loss"]), metrics, weight, totals)
        if denominators is not None:
            outcome.denominators = Denominators(*denominators)
        rows = self._plan.batch_rows(step)
        return Through(own_gradients, Contrasted(outcome, [], of_parameters), rows)

    def _lead(
        self, step: int, found: Sequence[Sequence[Any]], beside: Callable[..., Any]
    ) -> list[Any]:
        """Compute the loss from all representations, and return the message for each rank."""
        plan, represented = self._plan, dict[int, Represented]()
        for *shards, theirs in found:
            represented |= {
                shard: Represented(*each) for shard, each in zip(shards, theirs, strict=True)
            }
        rows = plan.batch_rows(step)
        in_order = [represented[shard] for shard in range(plan.shards_of(step))]
        contrasted = _or_error(
            lambda: beside(
                lambda _replica, _stream: self._contrast(step, in_order, rows, training=True),
                at=("forward", step, 0),  # for the status: user code may hang, as in a shard
            )
        )
        if isinstance(contrasted, Exception):
            return [contrasted] * len(found)
        loss, of_parameters = contrasted.outcome, contrasted.of_parameters
        gradients = of_shards(contrasted, plan, step)
        own = loss.denominators
        denominators = None if own is None else [own.weights, own.terms]
        same = [loss.metrics, loss.weight, loss.totals, denominators, of_parameters]
        return [[*same, {s: gradients[s] for s in numbers}] for *numbers, _ in found]


def _or_error(work: Callable[[], T]) -> T | Exception:
    """Return the result of user code, or its error: all ranks are to raise the same error.

    Raises:
        RankError: another rank is lost.
    """
    try:
        return work()
    except RankError:
        raise
    except Exception as error:
        return error
