"""Optimizer, average and gradients of a coordinator whose updates are made by servers.

Without servers, before and after a loop, each works like its base class.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from quorate.engines.servers import RemoteGradient, Servers
from quorate.errors import SettingError
from quorate.replica.flat import Flat
from quorate.replica.shard_sum import ShardSum
from quorate.replica.sparse.found import Found, no_rows
from quorate.training.optimizing.closure import Closure
from quorate.training.optimizing.extent import Mean, Whole
from quorate.training.optimizing.lent_states import LentStates
from quorate.training.optimizing.mean import Addition
from quorate.training.optimizing.optimizer import FlatOptimizer, OptimizerFactory
from quorate.training.optimizing.update import Average
from quorate.training.serving.serving import Serving


class ServedOptimizer(FlatOptimizer):
    """The user's optimizer, with its state and steps on servers.

    Args:
        factory: the user's function from a list of parameters to an optimizer.
        model: the model whose trainable parameters are views of ``parameters``.
        serving: the connection to the servers.

    Raises:
        SettingError: the factory returns no optimizer, or one that needs whole parameters.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        model: torch.nn.Module,
        parameters: Flat,
        serving: Serving,
    ) -> None:
        super().__init__(factory, model, parameters)
        if not self.flat:
            expected = "none: this optimizer does not work element by element, and so not in slices"
            fix = "leave servers out, or take one that does, torch.optim.AdamW for example"
            raise SettingError("servers", type(self.inner).__name__, expected, fix)
        self._serving = serving
        self._is_ours = False  # whether this code itself accesses the state of ``inner``
        self._is_lent = False  # whether user code has received the state
        self.inner.state = LentStates(self._state_of, self._lend)

    def kept_by_rows(self, found: Found) -> frozenset[str]:
        """Return no names: servers have slices of vectors.

        Raises:
            SettingError: the optimizer takes some parameter's gradient by rows.
        """
        if kept := super().kept_by_rows(found):
            raise no_rows("servers", "some", min(kept))
        return kept

    def begin(self, servers: Servers) -> None:
        """Send parameters and state to the servers. Blocks."""
        for tensor in self._held:
            tensor.grad = None  # gradients of steps made in this process
        names = [
            [name for tensor in group["params"] for name in self._held[tensor]]
            for group in self.inner.param_groups
        ]
        groups = [*zip(names, self.inner.param_groups, strict=True)]
        with self._inside():
            self._serving.begin(servers, type(self.inner).__name__, groups, self.state())
            self.inner.state.clear()
            self._is_lent = False

    def end(self) -> None:
        """Fetch the state from the servers. Blocks.

        Raises:
            ServerError: a server is gone.
        """
        with self._inside():
            if not self._is_lent:
                self._read()
        self._is_lent = False

    @property
    def is_lent(self) -> bool:
        """True if user code has received the state, and may have changed it."""
        return self._is_lent

    def step(
        self, gradient: Flat, missing: Collection[str] = (), closure: Closure | None = None
    ) -> None:
        """Update the parameters on the servers. Blocks."""
        with self._inside():
            if not isinstance(gradient, RemoteGradient):
                super().step(gradient, missing, closure)
                return
            self.require_same_groups()
            self._serving.step(gradient.factor, sorted(missing), self.inner.param_groups)
            self.inner.step()  # no tensor has a gradient: only a schedule counts it

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Fetch the state of all parameters into ``state`` inside the block. Blocks."""
        with self._inside():
            if not self._serving.is_on or self._is_lent:
                yield
                return
            self._read()
            try:
                yield
            finally:
                self.inner.state.clear()

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the part of the state in this process; see ``whole``."""
        with self._inside():
            return super().state()

    def loadable(self, state: dict[str, dict[str, Any]]) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the argument of ``load``; see ``FlatOptimizer``."""
        with self._inside():
            return super().loadable(state)

    def load(self, loadable: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Load the result of ``loadable``."""
        with self._inside():
            super().load(loadable)

    def _read(self) -> None:
        super().load(super().loadable(self._serving.state()))

    def _lend(self) -> None:
        """Fetch the state when user code accesses it between updates."""
        if self._is_ours or self._is_lent or not self._serving.is_on:
            return
        with self._inside():
            self._read()
        self._is_lent = True

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Mark accesses to the state of ``inner`` as this code's own, so that no state is lent."""
        before, self._is_ours = self._is_ours, True
        try:
            yield
        finally:
            self._is_ours = before


class ServedAverage(Average):
    """The average of parameters, in slices on servers."""

    def __init__(self, decay: float, parameters: Flat, serving: Serving) -> None:
        super().__init__(decay, parameters)
        self._serving = serving
        serving.average(self.shadow)

    def update(self, n: int) -> None:
        """Add the parameters after update n (from 1) to the average."""
        if self._serving.is_on:
            self._serving.average_after(n)
        else:
            super().update(n)


class Served(Whole):
    """The extent of an update with a gradient on servers; a whole gradient without servers."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    def mean(
        self,
        total: ShardSum,
        additions: Sequence[Addition],
        device: torch.device,
        *,
        wants_norm: bool,
        cores: int,
    ) -> Mean:
        """Make the mean gradient of a sum; see ``Whole``. Blocks: servers add their gradients."""
        gradient = total.gradient
        if not isinstance(gradient, RemoteGradient):
            return super().mean(total, additions, device, wants_norm=wants_norm, cores=cores)
        for left, right in additions:
            left.add_(right)
        is_alright = self._serving.add(gradient, total.weight)
        is_alright = is_alright and math.isfinite(total.metrics["loss"])
        return Mean(
            gradient, is_alright, self._serving.norm() if wants_norm and is_alright else None
        )

    def not_finite(self, gradient: Flat) -> list[str]:
        """Return the names of the parameters whose gradient has a non-finite element."""
        if not isinstance(gradient, RemoteGradient):
            return super().not_finite(gradient)
        return self._serving.not_finite()
