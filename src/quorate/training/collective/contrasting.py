"""The loss over a whole batch on ranks: rank 0 computes the loss from all representations.

    each rank    forward of the rank's shards                      OwnShards.represented
    to rank 0    all representations; small headers to all ranks
    rank 0       loss of all rows, gradient by representations     Contrast
    from rank 0  to each rank, the gradient by representations of the rank's shards;
                 to all ranks, the loss and the loss's own gradient by parameters
    each rank    forward again, backward from the received gradient; the usual exchange

Rank 0 alone computes the loss: state that user code keeps beside the model, and that callbacks
change, exists on rank 0 only. And the representations of a batch cross the network only once, as
do their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from quorate.coordination.plan import Plan
from quorate.coordination.tree import tree_sum
from quorate.data.source import Source
from quorate.engines.collective.rank_control import RankControl
from quorate.engines.collective.rank_slices import RankSlices
from quorate.errors import RankError
from quorate.replica.flat import Flat
from quorate.replica.loss import Outcome
from quorate.replica.replica import Replica
from quorate.replica.shard_sum import Part, ShardSum
from quorate.replica.streams import Stream
from quorate.replica.totals import packed_totals, unpacked_totals
from quorate.replica.whole_batch.represented import Represented, Tensors
from quorate.training.crew import Crew
from quorate.training.state import State
from quorate.training.whole_batch.contrasted import Contrast, Contrasted
from quorate.training.whole_batch.whole_batch import (
    at_root,
    contrast_of,
    of_shards,
    weighted,
    with_loss,
)

CONTRASTED = "contrasted"  # kind of the record with the loss, or with an error in place of the loss

T = TypeVar("T")


class Beside(Protocol):
    """A function to run user code in the thread that computes shards."""

    def __call__(
        self, work: Callable[[Replica, Stream], T], at: tuple[str, int, int] | None = None
    ) -> T:
        """Return the result of ``work``. Blocks; see ``Member.beside``."""


class Through(NamedTuple):
    """The input of a rank's second pass over a step, with the loss to add to the step's sum."""

    gradients: dict[int, Tensors]  # by shard of this rank, by representations of the shard
    contrasted: Contrasted  # without the gradients by shard
    rows: int  # of the batch

    def add_to(self, own: Flat, slices: RankSlices) -> None:
        """Add the loss's own gradient by parameters to this rank's slices of the sum."""
        for name, gradient in self.contrasted.of_parameters.items():
            section = slices.whole.sections[name]
            # The gradient as laid out in the whole vector, with zeros in the gap.
            values = gradient.new_zeros(section.span)
            lies = values.as_strided(section.shape, section.stride)
            lies.copy_(weighted(gradient, self.rows))
            span = range(section.start, section.start + section.span)
            for start, length, at in slices.within(span, section.vector):
                part = values[start - section.start :][:length]
                own.vectors[section.vector][at : at + length].add_(part.to(own.device))

    def made_whole(self, parts: Sequence[Part], shards: int) -> list[Part]:
        """Return the sum of a step as its only part, with the loss of the whole batch."""
        total = tree_sum(parts, shards, ShardSum.add)
        return at_root(with_loss(total, self.contrasted), shards)


class Contrasting:
    """The part of this rank in the computation of the loss over a batch.

    Args:
        ranks: the connections to all ranks.
        plan: the plan of the loop.
        parameters: this rank's parameters; all ranks have the same layout.
        contrast: computes the loss; called on rank 0 alone.
    """

    def __init__(
        self,
        ranks: RankControl,
        plan: Plan,
        parameters: Flat,
        contrast: Contrast,
    ) -> None:
        self._ranks, self._plan, self._parameters = ranks, plan, parameters
        self._contrast = contrast

    def __call__(
        self,
        step: int,
        shards: range,
        represent: Callable[[int, range, Stream], list[Represented]],
        beside: Beside,
    ) -> Through:
        """Return the input of the second pass over a step. All ranks call. Blocks.

        Args:
            shards: the shards of this rank.
            represent: computes the representations of shards.
            beside: runs user code in the thread that computes shards.

        Raises:
            RankError: another rank is lost.
            Exception: the error of the lowest rank with an error; the same on all ranks.
        """
        own: list[Represented] = []
        error: Exception | None = None
        try:
            own = beside(lambda _, stream: represent(step, shards, stream))
        except RankError:
            raise
        except Exception as raised:  # an error of user code: all ranks raise the same error
            error = raised
        header = _header(shards, own, error)
        given = [_Given(**each) for each in self._ranks.gather(header)]
        for each in given:
            if each.error is not None:
                raise each.error
        if self._ranks.leads:
            return self._lead(step, given, own, beside)
        return self._follow(step, given[self._ranks.rank], own)

    def _lead(
        self, step: int, given: Sequence[_Given], own: Sequence[Represented], beside: Beside
    ) -> Through:
        """Receive all representations, compute the loss, and send each rank its gradients."""
        ranks, rows = self._ranks, self._plan.batch_rows(step)
        represented = dict(zip(given[0].shards, own, strict=True))
        takes: list[tuple[int, torch.Tensor]] = []
        for rank, theirs in enumerate(given[1:], start=1):
            coming = theirs.memory(ranks.device)
            for each in coming.values():
                takes += [(rank, part) for part in self._parts(each.tensors)]
            represented |= coming
        ranks.swap([], takes)
        shards = [represented[shard] for shard in range(self._plan.shards_of(step))]
        try:
            found = beside(
                lambda _replica, _stream: self._contrast(step, shards, rows, training=True),
                at=("forward", step, 0),  # phase for the status: user code may hang, as in a shard
            )
        except RankError:
            raise
        except Exception as raised:  # also an error of user code
            ranks.tell({"kind": CONTRASTED, "error": raised})
            raise
        ranks.tell({"kind": CONTRASTED, **_described(found)})
        gradients = of_shards(found, self._plan, step)
        ranks.swap(
            [
                (rank, part)
                for rank, theirs in enumerate(given[1:], start=1)
                for tensors in (found.of_parameters, *map(gradients.__getitem__, theirs.shards))
                for part in self._parts(tensors)
            ],
            [],
        )
        mine = {shard: gradients[shard] for shard in given[0].shards}
        return Through(mine, found._replace(gradients=[]), rows)

    def _follow(self, step: int, given: _Given, own: Sequence[Represented]) -> Through:
        """Send this rank's representations, and receive the loss and gradients from rank 0."""
        ranks, views = self._ranks, self._parameters.views
        ranks.swap([(0, part) for each in own for part in self._parts(each.tensors)], [])
        record = ranks.hear()
        if "error" in record:
            raise record["error"]
        of_parameters = {
            name: torch.empty(views[name].shape, dtype=views[name].dtype, device=ranks.device)
            for name in record["parameters"]
        }
        gradients: dict[int, Tensors] = {
            shard: {name: each.tensors[name] for name in record["representations"]}
            for shard, each in given.memory(ranks.device).items()
        }
        coming = [of_parameters, *gradients.values()]
        ranks.swap([], [(0, part) for tensors in coming for part in self._parts(tensors)])
        contrasted = Contrasted(_outcome(record), [], of_parameters)
        return Through(gradients, contrasted, self._plan.batch_rows(step))

    def _parts(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors as bytes, which every backend can send; as views if possible."""
        return [
            tensor.to(self._ranks.device).contiguous().reshape(-1).view(torch.uint8)
            for tensor in tensors.values()
        ]


class _Given(NamedTuple):
    """A header: the shards of a rank, and the forms of the shards' representations."""

    shards: list[int]
    kinds: list[str]  # by index in ``shards``; see ``Represented``
    tensors: list[list[tuple[str, str, list[int]]]]  # by index in ``shards``: names, dtypes, shapes
    error: BaseException | None  # raised in place of representations

    def memory(self, device: torch.device) -> dict[int, Represented]:
        """Return new memory for the representations of the shards."""
        return {
            shard: Represented(
                kind,
                {
                    name: torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                    for name, dtype, shape in tensors
                },
            )
            for shard, kind, tensors in zip(self.shards, self.kinds, self.tensors, strict=True)
        }


def _header(shards: range, own: Sequence[Represented], error: Exception | None) -> dict[str, Any]:
    """Return the message from which every rank makes a ``_Given``."""
    return {
        "shards": [] if error is not None else [*shards],
        "kinds": [each.kind for each in own],
        "tensors": [
            [
                (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
                for name, tensor in each.tensors.items()
            ]
            for each in own
        ],
        "error": error,
    }


def _described(found: Contrasted) -> dict[str, Any]:
    """Return a message with everything in a computed loss except tensors."""
    return {
        "metrics": found.outcome.metrics,
        "weight": found.outcome.weight,
        "totals": packed_totals(found.outcome.totals),
        "parameters": [*found.of_parameters],
        "representations": [*found.gradients[0]],
    }


def _outcome(record: Mapping[str, Any]) -> Outcome:
    metrics = record["metrics"]
    loss = torch.tensor(metrics["loss"])
    return Outcome(loss, metrics, record["weight"], unpacked_totals(record["totals"]))


def contrasting_of(
    ranks: RankControl, crew: Crew, state: State, source: Source
) -> Contrasting | None:
    """Return this rank's part in a loss over whole batches; None without such a loss.

    Raises:
        SettingError: the optimizer needs a step's gradient again.
    """
    contrast = contrast_of(crew, state, source)
    if contrast is None:
        return None
    return Contrasting(ranks, source.plan, state.parameters, contrast)
