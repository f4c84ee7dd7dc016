"""Making: the optimizer and the average of a state, by who makes updates: here, ranks, servers."""

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
    """Where the updates of a state are made."""

    model: torch.nn.Module
    parameters: Flat  # of which the model's trainable parameters are views
    exchange: GradientExchange | None = None  # of ranks, if they make updates together
    serving: Serving | None = None  # of servers, if they do
    parts: int = 1  # processes that make an update, each of its part; parameters are shared then
    notes: Notes | None = None  # for the user

    def optimizer(self, factory: OptimizerFactory, *, is_sharded: bool) -> FlatOptimizer:
        """Return the user's optimizer.

        Args:
            factory: the user's.
            is_sharded: whether each rank has the state of its slices alone.

        Raises:
            SettingError: it is none, or cannot work here.
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
        """Return the optimizer of a phase, which trains the parameters of these names."""
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
