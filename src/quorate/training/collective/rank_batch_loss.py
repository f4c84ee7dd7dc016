"""The loss over a whole batch on ranks: rank 0 computes the loss from all representations.

    each rank    forward of the rank's shards                      RankWorker._represented
    to rank 0    all representations
    rank 0       loss of all rows, gradient by representations     LocalBatchLoss
    from rank 0  to each rank, the gradient by representations of the rank's shards;
                 to all ranks, the loss and the loss's own gradient by parameters
    each rank    forward again, backward from the received gradient; the usual exchange

Rank 0 alone computes the loss: state that user code keeps beside the model, and that callbacks
change, exists on rank 0 only. And the representations of a batch cross the network only once, as
do their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from quorate.coordination.tree import leaves
from quorate.engines.collective.exchange import GradientExchange
from quorate.errors import RankError
from quorate.replica.flat import Flat
from quorate.replica.loss import LossResult
from quorate.replica.loss_terms import Denominators
from quorate.replica.whole_batch.represented import Representations, Tensors
from quorate.training.batch_loss import BatchLossResult, LocalBatchLoss
from quorate.training.optimizing.entries import in_memory_order
from quorate.training.optimizing.not_finite import are_finite

T = TypeVar("T")


class RankBatchLoss:
    """The computation of the loss of a batch on ranks: see ``BatchLoss``. All ranks call.

    Args:
        batch_loss: computes the loss; called on rank 0 alone.
        exchange: the exchange of gradients among the ranks.
        beside: runs user code in the thread that computes shards: ``RankWorker.beside``.
    """

    def __init__(
        self, batch_loss: LocalBatchLoss, exchange: GradientExchange, beside: Callable[..., Any]
    ) -> None:
        self._batch_loss, self._exchange, self._beside = batch_loss, exchange, beside

    def __call__(self, step: int, shards: Sequence[Representations]) -> BatchLossResult:
        """Return the loss of a batch, with the gradients of this rank's shards. Blocks.

        Args:
            shards: all shards of the batch, in order; with values on rank 0 alone.

        Raises:
            RankError: another rank is lost.
            Exception: an error of user code on rank 0; the same on all ranks.
        """
        ranks = self._exchange.ranks
        dealt = ranks.deal(self._lead(step, shards) if ranks.leads else ())
        if isinstance(dealt, BaseException):
            ranks.raise_together(dealt)
        metrics, weight, totals, denominators, of_parameters, gradients = dealt
        outcome = LossResult(torch.tensor(metrics["loss"]), metrics, weight, weight, totals)
        if denominators is not None:
            outcome.denominators = Denominators(*denominators)
        return BatchLossResult(outcome, gradients, of_parameters)

    def _lead(self, step: int, shards: Sequence[Representations]) -> list[Any]:
        """Compute the loss from all representations, and return the message for each rank."""
        dealt = self._exchange.dealt(len(shards))
        result = or_error(
            lambda: self._beside(
                lambda _replica, _stream: self._batch_loss(step, shards),
                at=("forward", step, 0),  # for the status: user code may hang, as in a shard
            )
        )
        if isinstance(result, Exception):
            return [result] * len(dealt)
        loss, gradients = result.outcome, result.gradients
        own = loss.denominators
        denominators = None if own is None else [own.weights, own.terms]
        same = [loss.metrics, loss.weight, loss.totals, denominators, result.of_parameters]
        by_rank = [range(0) if node is None else leaves(node, len(shards)) for node in dealt]
        return [[*same, {shard: gradients[shard] for shard in numbers}] for numbers in by_rank]

    def add_to(self, gradient: Flat, own: Tensors) -> None:
        """Add gradients by parameters to this rank's slices of the gradient of a step. Blocks."""
        exchange = self._exchange
        ranks, partition = exchange.ranks, exchange.partition
        for piece in partition.pieces(ranks.rank):
            if (values := own.get(piece.name)) is not None:
                section = partition.whole.sections[piece.name]
                ordered = values.new_empty_strided(section.shape, section.stride)
                ordered.copy_(values)
                part = in_memory_order(ordered)[piece.start : piece.stop]
                gradient.views[piece.key].add_(part.to(gradient.device))
        exchange.is_finite = all(ranks.gather(are_finite(gradient)))


def or_error(work: Callable[[], T]) -> T | Exception:
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
