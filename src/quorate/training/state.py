"""The state of training, held by the coordinator and saved in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from quorate.coordination.tally import Tally
from quorate.errors import SettingError, UserError
from quorate.replica.buffers import Buffers
from quorate.replica.compiling import as_given
from quorate.replica.flat import Flat, Layout
from quorate.replica.loss import Loss
from quorate.replica.model import aliases, bind, trainable
from quorate.replica.notes import Notes
from quorate.replica.shared.copies import deep_copy
from quorate.training.model_edits import ModelEdits
from quorate.training.optimizing.average import Average
from quorate.training.optimizing.optimize import Optimize
from quorate.training.optimizing.optimizer import FlatOptimizer
from quorate.training.optimizing.owners import Owners
from quorate.training.optimizing.phases import Phases
from quorate.training.owners.saves import Saves
from quorate.training.owners.server_owners import ServerStandIn


class State:
    """Parameters, buffers, optimizer, schedule and average of a model after some updates.

    Args:
        model: the user's model; its trainable parameters become views of flat vectors on
            ``device``.
        mutable_frozen: see ``Buffers``.
        written: names of trained parameters written by the forward pass; see ``ParameterWrites``.
        by_rows: names of parameters whose gradient is kept by rows.
        shared: whether other processes map the vectors; ``device`` must be the CPU.
        optimize: how the updates of each phase are made; see ``Phases``.
        loss: the loss, or the losses of the phases.
        notes: messages for the user.
        owners: returns the owners of parameters; by default, this process alone.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        *,
        shared: bool,
        mutable_frozen: frozenset[int] = frozenset(),
        written: frozenset[str] = frozenset(),
        by_rows: frozenset[str] = frozenset(),
        optimize: Mapping[str | None, Optimize],
        loss: Loss,
        notes: Notes | None = None,
        owners: Callable[[Flat], Owners] = Owners,
    ) -> None:
        self.model = model.to(device)
        self.global_step = 0  # updates applied so far
        self.left_open: set[int] = set()  # steps not applied, though later steps are
        self.tally = Tally()
        self.dropped_rows = 0  # of the current epoch
        self.not_finite = 0  # updates not made because of a non-finite gradient
        self.evaluated_at = 0  # number of updates at the last evaluation of the validation set
        self.best: dict[str, Any] | None = None  # value and global_step by a named metric
        self.callbacks: dict[str, dict[str, Any]] = {}  # saved state of each callback, by name
        self.callbacks_saved: dict[str, dict[str, Any]] = {}  # loaded, not given to callbacks yet
        parameters = trainable(model)
        layout = Layout(parameters.items(), by_rows)
        self.parameters = layout.shared() if shared else layout.new(device)
        for name, parameter in parameters.items():
            self.parameters.views[name].copy_(parameter.detach())
        followers = aliases(model)
        bind(parameters, self.parameters)
        for follow in followers:
            follow()
        self.mutable_frozen, self.written = mutable_frozen, written
        self.buffers = Buffers(model, mutable_frozen)
        made = owners(self.parameters)
        if isinstance(made, ServerStandIn) and written:
            name = min(written)
            expected = f"none, as the forward pass writes parameters: {name!r}"
            raise SettingError("servers", "some", expected, "leave them out")
        self.notes = notes = notes or Notes()
        decays = [each.ema_decay for each in optimize.values() if each.ema_decay is not None]
        self.average = Average(max(decays), self.parameters) if decays else None
        self.phases = Phases(*(optimize, loss, model, made, self.buffers, self.average, notes))
        self.update = next(iter(self.phases.updates.values()))  # of the phase under way
        self.saves: Saves | None = None  # of a loop whose owners each have a part of the state
        self.model_edits = ModelEdits(model, self.parameters, mutable_frozen, notes)

    @property
    def optimizer(self) -> FlatOptimizer:
        """The optimizer; the first, if there are several."""
        return self.phases.optimizers[0]

    @property
    def owners(self) -> Owners:
        """The owners of the parameters, who make the updates."""
        return self.update.owners

    @owners.setter
    def owners(self, owners: Owners) -> None:
        for update in self.phases.updates.values():
            update.owners = owners

    def begin_phase(self, phase: str | None) -> None:
        """Select the phase of the next update; None without phases."""
        self.update = self.phases.updates[phase]

    def require_whole_update(self) -> None:
        """Refuse a state whose last update was interrupted.

        Raises:
            UserError: the update was interrupted.
        """
        if self.update.is_half_made:
            raise UserError(
                f"update {self.global_step + 1} was interrupted, and only a part of the parameters "
                "is updated",
                fix="make a new Trainer, which resumes from run_dir",
            )

    def bring_home(self) -> None:
        """Fetch parameters and averages from servers. Blocks.

        Raises:
            ServerError: a server is gone.
        """
        self.owners.fetch_parameters()

    def end_parts(self) -> None:
        """End the processes that make updates, if there are some. The whole state is here."""
        for optimizer in self.phases.optimizers:
            optimizer.close()

    def leave_ranks(self) -> None:
        """Gather all of the state here, and go on without the other ranks. Blocks."""
        for optimizer in self.phases.spread:
            optimizer.leave_owners()
        self.owners = Owners(self.parameters)

    def tensors(self, parameters: Flat | None = None) -> dict[str, torch.Tensor]:
        """Return the tensors of the model's state dict, in its order, by the user's names.

        Args:
            parameters: parameters of the same layout, to be used instead of the plain ones.
        """
        tensors = {n: t for n, t in self.model.state_dict().items() if isinstance(t, torch.Tensor)}
        if parameters is None:
            return tensors
        own = {_place(view): name for name, view in self.parameters.views.items()}
        return {
            name: parameters.views[own[_place(tensor)]] if _place(tensor) in own else tensor
            for name, tensor in tensors.items()
        }

    def averaged_names(self) -> list[str]:
        """Return the state dict names of averaged parameters."""
        own = {_place(view) for view in self.parameters.views.values()}
        return [name for name, tensor in self.tensors().items() if _place(tensor) in own]

    def rest(self, parameters: Flat | None = None) -> dict[str, torch.Tensor]:
        """Return parameters and buffers left out by the model's state dict, by name.

        Left out are buffers that are not persistent, and any tensor missing from a state dict of
        the user's own, or present as a copy only.

        Args:
            parameters: parameters of the same layout: then only parameters are returned.
        """
        held = {_place(tensor) for tensor in self.tensors(parameters).values()}
        named: Iterable[tuple[str, torch.Tensor]]
        if parameters is None:
            named = (*self.model.named_parameters(), *self.model.named_buffers())
        else:
            named = parameters.views.items()
        return {n: t.detach() for n, t in named if t.numel() and _place(t) not in held}

    def averaged_model(self) -> torch.nn.Module | None:
        """Return a copy of the model with the averaged parameters, or None without an average."""
        if self.average is None:
            return None
        model = deep_copy(self.model)
        model.load_state_dict(self.tensors(self.average.shadow), strict=False)
        return as_given(self.model, model)

    def count_update(self, step: int) -> None:
        """Count the update of a step."""
        end = self.global_step + len(self.left_open)  # the step after the last applied step
        if step < end:
            self.left_open.remove(step)
        else:
            self.left_open.update(range(end, step))
        self.global_step += 1

    def account(self) -> dict[str, Any]:
        """Return the counts of shards, rows and updates so far, and the open steps, for JSON."""
        return {
            "left_open": sorted(self.left_open),
            "tally": self.tally.to_json(),
            "dropped_rows": self.dropped_rows,
            "not_finite": self.not_finite,
            "evaluated_at": self.evaluated_at,
            "best": self.best,
        }

    def load_account(self, account: dict[str, Any]) -> None:
        """Load the result of ``account``."""
        self.left_open = {*account["left_open"]}
        self.tally = Tally(account["tally"])
        self.dropped_rows = account["dropped_rows"]
        self.not_finite = account["not_finite"]
        self.evaluated_at = account["evaluated_at"]
        self.best = account["best"]


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return the place of a tensor in memory: equal places hold the same tensor."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
