"""What makes updates in the place of the coordinator's own: optimizer, average, and what sees all.

Each is as ever as long as there are no servers: before a loop begins, and after it.
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
    """The user's optimizer, whose state and steps are the servers'.

    Args:
        factory: the user's, from a list of parameters to an optimizer.
        model: whose trainable parameters are views of ``parameters``.
        serving: asks the servers.

    Raises:
        SettingError: it is none, or one that has to see whole parameters.
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
        self._is_ours = False  # whether this code itself is at the state of ``inner``
        self._is_lent = False  # whether user code has been given the state
        self.inner.state = LentStates(self._state_of, self._lend)

    def kept_by_rows(self, found: Found) -> frozenset[str]:
        """Return none: servers have slices of vectors.

        Raises:
            SettingError: there is one whose optimizer wants it by rows.
        """
        if kept := super().kept_by_rows(found):
            raise no_rows("servers", "some", min(kept))
        return kept

    def begin(self, servers: Servers) -> None:
        """Give the servers what there is. Blocks."""
        for tensor in self._held:
            tensor.grad = None  # of steps that were made here
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
        """Take all of it back. Blocks.

        Raises:
            ServerError: a server is gone.
        """
        with self._inside():
            if not self._is_lent:
                self._read()
        self._is_lent = False

    @property
    def is_lent(self) -> bool:
        """Whether user code has been given the state, and may have changed it."""
        return self._is_lent

    def step(
        self, gradient: Flat, missing: Collection[str] = (), closure: Closure | None = None
    ) -> None:
        """Update the parameters where they are. Blocks."""
        with self._inside():
            if not isinstance(gradient, RemoteGradient):
                super().step(gradient, missing, closure)
                return
            self.require_same_groups()
            self._serving.step(gradient.factor, sorted(missing), self.inner.param_groups)
            self.inner.step()  # of nothing, as no tensor of it has a gradient: a schedule counts it

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within the block ``state`` is that of all parameters. Blocks."""
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
        """Return what is here of the state, see ``whole``."""
        with self._inside():
            return super().state()

    def loadable(self, state: dict[str, dict[str, Any]]) -> dict[torch.Tensor, dict[str, Any]]:
        """Return what ``load`` takes; see ``FlatOptimizer``."""
        with self._inside():
            return super().loadable(state)

    def load(self, loadable: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Take what ``loadable`` gave."""
        with self._inside():
            super().load(loadable)

    def _read(self) -> None:
        super().load(super().loadable(self._serving.state()))

    def _lend(self) -> None:
        """Have the state here where user code looks at it, between updates."""
        if self._is_ours or self._is_lent or not self._serving.is_on:
            return
        with self._inside():
            self._read()
        self._is_lent = True

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Within the block nothing is lent: it is this code that is at the state of ``inner``."""
        before, self._is_ours = self._is_ours, True
        try:
            yield
        finally:
            self._is_ours = before


class ServedAverage(Average):
    """The average of parameters, of which each server has its slice."""

    def __init__(self, decay: float, parameters: Flat, serving: Serving) -> None:
        super().__init__(decay, parameters)
        self._serving = serving
        serving.average(self.shadow)

    def update(self, n: int) -> None:
        """Take the parameters in, as they are after update n (from 1)."""
        if self._serving.is_on:
            self._serving.average_after(n)
        else:
            super().update(n)


class Served(Whole):
    """The update has a gradient that servers hold, or a whole one where there are none."""

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
        """Make the mean gradient of a sum; see ``Whole``. Blocks: servers add up what they hold."""
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
        """Return the parameters whose gradient is not finite everywhere."""
        if not isinstance(gradient, RemoteGradient):
            return super().not_finite(gradient)
        return self._serving.not_finite()
