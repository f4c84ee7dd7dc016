"""Owners: the processes that have the optimizer's state and make the updates.

``Owners`` is this process alone, and the base of all further owners (``training/owners``). An
update is the same for all owners: ``Update`` decides, and each owner carries out the decision.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import ClassVar

from quorate.engines.partition import Partition
from quorate.replica.flat import Flat
from quorate.replica.shard_sum import ShardSum
from quorate.training.optimizing.average import Average
from quorate.training.optimizing.cores import cores_for
from quorate.training.optimizing.mean import (
    Addition,
    Mean,
    clip_scale,
    mean_of_sum,
    squares_on_cores,
)
from quorate.training.optimizing.not_finite import not_finite
from quorate.training.optimizing.optimizer import FlatOptimizer


class Owners:
    """The owners of a state: this process has everything.

    Args:
        parameters: the parameters, whole.
        new_optimizer: the class of optimizers over the parameters; see ``FlatOptimizer``.

    Attributes:
        partition: the partition of the gradient among the owners.
        owner: the number of this process among the owners.
    """

    # Setting and value that refuse gradients by rows; None: all gradients are accepted.
    refuses_rows: ClassVar[tuple[str, str] | None] = None

    def __init__(
        self, parameters: Flat, new_optimizer: Callable[..., FlatOptimizer] = FlatOptimizer
    ) -> None:
        self.parameters, self.new_optimizer, self.owner = parameters, new_optimizer, 0
        self.partition = Partition.of_one_owner(parameters.layout.gradients)
        self.cores = cores_for(sum(parameters.layout.sizes))

    def add(self, optimizer: FlatOptimizer, *, shards: bool) -> None:
        """Take charge of an optimizer made by ``new_optimizer``.

        Args:
            shards: whether the state may be split among ranks.

        Raises:
            SettingError: the optimizer does not work with these owners.
        """

    # --- an update --------------------------------------------------------------------------------

    def mean(self, total: ShardSum, additions: Sequence[Addition], *, wants_norm: bool) -> Mean:
        """Make the mean gradient of a sum, each owner its part; see ``mean_of_sum``. Blocks.

        Args:
            total: the sum. Its gradient is complete after the additions.
            additions: additions of gradients, in order.
            wants_norm: whether to compute the norm.
        """
        device = self.parameters.device
        return mean_of_sum(total, additions, device, wants_norm=wants_norm, cores=self.cores)

    def not_finite(self, gradient: Flat) -> list[str]:
        """Return the names of the parameters whose gradient has a non-finite element. Blocks."""
        return not_finite(gradient)

    def norms(self, own: list[float]) -> list[list[float]]:
        """Return the squared norms of blocks of all owners, by owner. Blocks.

        Args:
            own: the squared norms of this owner's blocks.
        """
        return [own]

    def clip(self, optimizer: FlatOptimizer, gradient: Flat, most: float) -> None:
        """Scale the mean gradient of an optimizer's own parameters down to a norm. Blocks.

        Args:
            gradient: the ranges of this owner.
        """
        names, ranges = optimizer.own_names, gradient.vectors
        blocks = self.partition.blocks(self.owner, names)
        own = [ranges[block.number][block.at.start : block.at.stop] for block in blocks]
        rows = gradient.rows.items()
        own += [each.values.view(-1) for name, each in rows if name in names]
        squares = squares_on_cores(own, optimizer.cores)
        of_all = self.norms(squares[: len(blocks)])
        scale = clip_scale(most, self.partition.norm(of_all, names, squares[len(blocks) :]))
        for stretch in own if scale < 1 else ():
            stretch.mul_(scale)

    def step(self, optimizer: FlatOptimizer, gradient: Flat, missing: Collection[str]) -> None:
        """Let each owner update its parameters from its part of the mean gradient. Blocks.

        Args:
            missing: parameters without a gradient.
        """
        optimizer.step(gradient, missing)

    def publish(self, optimizers: Sequence[FlatOptimizer]) -> None:
        """Pass new parameters on, after the steps of all optimizers of an update. Blocks."""

    def add_to_average(self, average: Average, n: int) -> None:
        """Add the parameters after update n (from 1) to an average. Blocks."""
        average.update(n)

    def gather_gradient(self, gradient: Flat) -> Flat:
        """Return a copy of the whole gradient: the memory of a sum is reused. Blocks."""
        return gradient.copied()

    # --- between updates --------------------------------------------------------------------------

    @property
    def has_one_copy(self) -> bool:
        """True if all processes that compute share the memory of the parameters with this one."""
        return False

    def send_user_changes(self, has_changed: Callable[[], bool]) -> None:
        """Send changes by user code to servers, before the next shard is dealt. Blocks.

        Args:
            has_changed: returns whether user code changed values since the last update.
        """

    def fetch_parameters(self) -> None:
        """Fetch parameters and averages from the owners, if updates were made since. Blocks.

        Raises:
            ServerError: an owner is gone.
        """
