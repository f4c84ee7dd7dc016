"""The state of training: what the coordinator holds, and what a checkpoint saves."""

from __future__ import annotations

from typing import Any

import torch

from quorate.coordination.tally import Tally
from quorate.replica.buffers import Buffers
from quorate.replica.flat import Flat, Layout
from quorate.replica.model import bind, trainable
from quorate.replica.shared.copies import deep_copy
from quorate.training.optimizing.optimize import Optimize
from quorate.training.optimizing.optimizer import FlatOptimizer
from quorate.training.optimizing.update import Average, Update


class State:
    """Parameters, buffers, optimizer, schedule and average of one model, after some updates.

    Args:
        model: the user's; its trainable parameters become views of flat vectors on ``device``.
        mutable_frozen: see ``Buffers``.
        written: names of trained parameters that the forward pass writes; see ``Writes``.
        shared: whether other processes are to map the vectors; ``device`` must be the CPU.
        optimize: how updates are made.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        *,
        shared: bool,
        mutable_frozen: frozenset[int] = frozenset(),
        written: frozenset[str] = frozenset(),
        optimize: Optimize,
    ) -> None:
        self.model = model.to(device)
        self.global_step = 0  # updates applied so far
        self.left_open: list[int] = []  # see ``Coordinator``
        self.tally = Tally()
        self.dropped_rows = 0  # of the epoch under way
        self.not_finite = 0  # updates that were not made for that
        self.evaluated_at = 0  # updates, when the validation set was evaluated last
        self.best: dict[str, Any] | None = None  # by a named metric: its value and global_step
        parameters = trainable(model)
        layout = Layout(parameters.items())
        self.parameters = layout.shared() if shared else layout.new(device)
        for name, parameter in parameters.items():
            self.parameters.views[name].copy_(parameter.detach())
        bind(parameters, self.parameters)
        self.mutable_frozen, self.written = mutable_frozen, written
        self.buffers = Buffers(model, mutable_frozen)
        self.optimizer = FlatOptimizer(optimize.optimizer, model, self.parameters)
        self.average = (
            None if optimize.ema_decay is None else Average(optimize.ema_decay, self.parameters)
        )
        self.update = Update(
            self.optimizer,
            self.buffers,
            clip_norm=optimize.clip_norm,
            schedule=optimize.schedule,
            average=self.average,
        )

    def tensors(self, parameters: Flat | None = None) -> dict[str, torch.Tensor]:
        """Return the model's state dict under the user's own names: tensors only, in its order.

        Args:
            parameters: others of the same layout in the place of the plain ones.
        """
        tensors = {n: t for n, t in self.model.state_dict().items() if isinstance(t, torch.Tensor)}
        if parameters is None:
            return tensors
        own = {id(p): name for name, p in trainable(self.model).items()}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if name in tensors and id(parameter) in own:  # a tied one is there under each name
                tensors[name] = parameters.views[own[id(parameter)]]
        return tensors

    def averaged_model(self) -> torch.nn.Module | None:
        """Return a copy of the model with the averaged parameters, or None without an average."""
        if self.average is None:
            return None
        model = deep_copy(self.model)
        model.load_state_dict(self.tensors(self.average.shadow), strict=False)
        return model

    def account(self) -> dict[str, Any]:
        """Return what became of the shards so far, and which are left, for JSON."""
        return {
            "left_open": self.left_open,
            "tally": self.tally.to_json(),
            "dropped_rows": self.dropped_rows,
            "not_finite": self.not_finite,
            "evaluated_at": self.evaluated_at,
            "best": self.best,
        }

    def load_account(self, account: dict[str, Any]) -> None:
        """Take what ``account`` gave."""
        self.left_open = account["left_open"]
        self.tally = Tally(account["tally"])
        self.dropped_rows = account["dropped_rows"]
        self.not_finite = account["not_finite"]
        self.evaluated_at = account["evaluated_at"]
        self.best = account["best"]

    def go_to(self, global_step: int) -> None:
        """Bring the schedule to where it is after so many updates.

        A learning rate is a function of the update count alone: the count is replayed, and the
        checkpoint need not know how a scheduler remembers it.
        """
        self.global_step = global_step
        for _ in range(global_step):
            self.update.skip()
