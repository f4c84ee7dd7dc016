"""The choice of an optimizer's class, by who makes the updates: this process, ranks, servers."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from quorate.engines.collective.exchange import GradientExchange
from quorate.replica.flat import Flat
from quorate.replica.notes import Notes
from quorate.training.optimizing.optimizer import FlatOptimizer, OptimizerFactory
from quorate.training.optimizing.sliced_optimizer import SlicedOptimizer
from quorate.training.parts.parted_optimizer import PartedOptimizer
from quorate.training.serving.served_optimizer import ServedOptimizer


class Making(NamedTuple):
    """The place where the updates of a training state are made."""

    model: torch.nn.Module
    parameters: Flat  # the model's trainable parameters are views of these
    notes: Notes  # messages for the user
    exchange: GradientExchange | None = None  # exchange of ranks, if they make updates together
    served: bool = False  # whether servers make updates
    parts: int = 1  # processes making an update, each of a part; parameters are shared if > 1

    def optimizer(
        self,
        factory: OptimizerFactory,
        *,
        is_sharded: bool,
        names: Collection[str] | None,
    ) -> FlatOptimizer:
        """Return the user's optimizer.

        Args:
            factory: the user's function from a list of parameters to an optimizer.
            is_sharded: whether each rank has the state of its slices alone.
            names: names of the parameters of a phase, whose state is not sharded. Default: all.

        Raises:
            SettingError: the function returns no optimizer, or an optimizer that cannot work.
        """
        over = factory, self.model, self.parameters
        if self.exchange is not None:
            return SlicedOptimizer(
                *over,
                exchange=self.exchange,
                is_sharded=is_sharded and names is None,
                names=names,
            )
        if self.served:
            return ServedOptimizer(*over)
        if self.parts == 1 or names is not None:
            return FlatOptimizer(*over, names)
        parted = PartedOptimizer(*over, self.parts)
        if not parted.flat:
            kind = type(parted.inner).__name__
            self.notes.add(
                f"one process makes all updates and holds the whole optimizer state, because "
                f"{kind} does not work element by element"
            )
        return parted
