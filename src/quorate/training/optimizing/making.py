"""Making: the optimizer and average of a training state, by who makes updates (ranks, servers)."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from quorate.engines.collective.exchange import GradientExchange
from quorate.replica.flat import Flat
from quorate.replica.notes import Notes
from quorate.training.optimizing.extent import Sliced, Whole
from quorate.training.optimizing.optimizer import FlatOptimizer, OptimizerFactory
from quorate.training.optimizing.sliced_optimizer import SlicedOptimizer
from quorate.training.optimizing.update import Average
from quorate.training.parts.parted_optimizer import PartedOptimizer
from quorate.training.serving.served import Served, ServedAverage, ServedOptimizer
from quorate.training.serving.serving import Serving


class Making(NamedTuple):
    """The place where the updates of a training state are made."""

    model: torch.nn.Module
    parameters: Flat  # the model's trainable parameters are views of these
    exchange: GradientExchange | None = None  # exchange of ranks, if they make updates together
    serving: Serving | None = None  # connection to the servers, if servers make updates
    parts: int = 1  # processes making an update, each of a part; parameters are shared if > 1
    notes: Notes | None = None  # messages for the user

    def optimizer(self, factory: OptimizerFactory, *, is_sharded: bool) -> FlatOptimizer:
        """Return the user's optimizer.

        Args:
            factory: the user's function from parameters to an optimizer.
            is_sharded: whether each rank has the state of its slices alone.

        Raises:
            SettingError: the function returns no optimizer, or an optimizer that cannot work.
        """
        if self.serving is not None:
            return ServedOptimizer(factory, self.model, self.parameters, self.serving)
        if self.parts > 1:
            parted = PartedOptimizer(factory, self.model, self.parameters, self.parts)
            if not parted.flat and self.notes is not None:
                kind = type(parted.inner).__name__
                self.notes.add(
                    f"one process makes all updates and holds the whole optimizer state, because "
                    f"{kind} does not work element by element"
                )
            return parted
        if self.exchange is None:
            return FlatOptimizer(factory, self.model, self.parameters)
        return SlicedOptimizer(
            factory, self.model, self.parameters, exchange=self.exchange, is_sharded=is_sharded
        )

    def optimizer_of(self, factory: OptimizerFactory, names: Collection[str]) -> FlatOptimizer:
        """Return the optimizer of a phase, which trains the parameters of the given names."""
        if self.exchange is None:
            return FlatOptimizer(factory, self.model, self.parameters, names)
        return SlicedOptimizer(
            factory,
            self.model,
            self.parameters,
            exchange=self.exchange,
            is_sharded=False,
            names=names,
        )

    def average(self, decay: float | None) -> Average | None:
        """Return the average of the parameters; None without a decay."""
        if decay is None:
            return None
        if self.serving is not None:
            return ServedAverage(decay, self.parameters, self.serving)
        return Average(decay, self.parameters)

    def extent(self) -> Whole | Sliced:
        """Return the extent of gradients."""
        if self.serving is not None:
            return Served(self.serving)
        return Whole() if self.exchange is None else Sliced(self.exchange)
