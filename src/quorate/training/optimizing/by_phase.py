"""Updates of several phases: each phase has a separate optimizer, schedule and clip.

The parameters of all models lie in one flat vector, and an optimizer has the stretches of the
parameters trained by its phase. So the code for vectors, sums, snapshots and checkpoints does not
depend on phases. An update belongs to one phase: schedules, averages and optimizers count the
updates of their own phase only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quorate.errors import MisfitError, SettingError
from quorate.machine.text import printable
from quorate.replica.buffers import Buffers
from quorate.replica.flat import Flat
from quorate.replica.notes import Notes
from quorate.replica.shard_sum import Part
from quorate.replica.sparse.found import Found
from quorate.training.optimizing.average import Average
from quorate.training.optimizing.choices import OptimizeByPhase
from quorate.training.optimizing.closure import needs_closure
from quorate.training.optimizing.making import Making
from quorate.training.optimizing.optimize import Optimize
from quorate.training.optimizing.optimizer import FlatOptimizer
from quorate.training.optimizing.optimizer_state import LoadableOptimizer, OptimizerState
from quorate.training.optimizing.sliced_optimizer import SlicedOptimizer
from quorate.training.optimizing.update import Again, Applied, Update


@dataclass
class Own:
    """The optimizer, schedule and state of one phase."""

    optimize: Optimize
    optimizer: FlatOptimizer
    update: Update
    state: OptimizerState
    updates: int = 0  # updates of this phase, made or skipped


class LoadablePhases(NamedTuple):
    """The state of each phase from a checkpoint, read and compared."""

    states: dict[str, LoadableOptimizer]
    updates: dict[str, int]


class PhaseOptimizers:
    """The optimizers of all phases, with the part of ``FlatOptimizer`` that a training state uses.

    Args:
        by_name: the optimizers, in the order of the phases.
        parameters: the parameters of all models.
    """

    takes_closure = False
    has_modes = False
    is_sharded = False  # each rank of a collective has all of the state
    is_lent = False

    def __init__(self, by_name: Mapping[str, FlatOptimizer], parameters: Flat) -> None:
        self.by_name = by_name
        self.flat_parameters = parameters

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all phases, in order."""
        return [group for each in self.by_name.values() for group in each.param_groups]

    def note_state(self) -> None:
        """Note the state that each rank holds by itself; see ``SlicedOptimizer``."""
        for each in self._sliced():
            each.note_state()

    def require_same_state(self) -> None:
        """Check that user code has not changed, on this rank alone, state that each rank holds.

        Raises:
            UserError: user code has changed such state.
        """
        for each in self._sliced():
            each.require_same_state()

    def scatter(self) -> None:
        """Do nothing: no phase is sharded, each rank has all of the state."""

    def stay_alone(self) -> None:
        """Go on without the other ranks."""
        for each in self._sliced():
            each.stay_alone()

    def kept_by_rows(self, found: Found) -> frozenset[str]:
        """Return the parameters with gradients by rows in all phases; see ``FlatOptimizer``."""
        kept = [(each.parameters, each.kept_by_rows(found)) for each in self.by_name.values()]
        dense = {name for ours, by_rows in kept for name in ours if name not in by_rows}
        return found.by_rows - dense

    def _sliced(self) -> Iterator[SlicedOptimizer]:
        return (each for each in self.by_name.values() if isinstance(each, SlicedOptimizer))

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context for evaluation, in which the parameters are unchanged."""
        return nullcontext()

    def whole(self) -> AbstractContextManager[None]:
        """Return a context in which the state of all parameters is present: nothing to do."""
        return nullcontext()


class PhaseUpdates:
    """The updates of all phases, applied to the parameters one phase at a time. See ``Update``.

    Args:
        optimize: how the updates of each phase are made.
        making: makes the optimizers.
        buffers: the buffers of the model.
        average: the average of the parameters, if some phase averages its parameters.
        notes: messages for the user.

    Raises:
        SettingError: an optimizer cannot work at all, or not in a phase.
    """

    def __init__(
        self,
        optimize: OptimizeByPhase,
        making: Making,
        buffers: Buffers,
        average: Average | None,
        notes: Notes,
    ) -> None:
        self.by_name: dict[str, Own] = {}
        for name, choice in optimize.by_name.items():
            names = optimize.losses.trained(making.model, name)
            optimizer = making.optimizer(choice.optimizer, names=names)
            if optimizer.has_modes or needs_closure(optimizer.inner):
                got = f"{type(optimizer.inner).__name__} in phase {name!r}"
                expected = "optimizers that step from one gradient, and have one set of weights"
                raise SettingError("optimizer", got, expected, "take another, Adam for example")
            update = Update(
                optimizer,
                buffers,
                clip_norm=choice.clip_norm,
                schedule=choice.schedule,
                schedule_metric=choice.schedule_metric,
                # With a decay of 0 the shadow equals the parameters.
                average=None if average is None else average.of(names, choice.ema_decay or 0.0),
            )
            state = OptimizerState(optimizer, update, making.model, notes)
            self.by_name[name] = Own(choice, optimizer, update, state)
        self._now = next(iter(self.by_name.values()))

    def begin(self, phase: str | None) -> Optimize:
        """Select the phase of the next update, and return how the update is made."""
        assert phase is not None
        self._now = self.by_name[phase]
        return self._now.optimize

    @property
    def optimizer(self) -> FlatOptimizer:
        """The optimizer of the selected phase."""
        return self._now.optimizer

    @property
    def optimizers(self) -> dict[str, FlatOptimizer]:
        """The optimizers of all phases."""
        return {name: own.optimizer for name, own in self.by_name.items()}

    @property
    def under_way(self) -> bool:
        """True if an update was interrupted: the parameters are half updated."""
        return any(own.update.under_way for own in self.by_name.values())

    @under_way.setter
    def under_way(self, value: bool) -> None:
        for own in self.by_name.values():
            own.update.under_way = value

    @property
    def sum_s(self) -> float:
        """Duration of the last mean, in seconds."""
        return self._now.update.sum_s

    def apply(
        self,
        parts: Iterable[Part],
        leaves: int,
        n: int,  # noqa: ARG002
        present: int,
        again: Again | None = None,  # noqa: ARG002
    ) -> Applied:
        """Make an update of the selected phase; see ``Update``."""
        own = self._now
        applied = own.update.apply(parts, leaves, own.updates + 1, present)
        own.updates += applied.not_finite is None
        return applied

    def skip(self) -> None:
        """Count an update of the selected phase that was not made."""
        self._now.updates += 1
        self._now.update.skip()

    def leave_average(self) -> None:
        """Stop averaging parameters: another process averages them."""
        for own in self.by_name.values():
            own.update.leave_average()

    def leave_schedule(self) -> None:
        """Stop stepping schedules: another process steps them and sets the learning rates."""
        for own in self.by_name.values():
            own.update.leave_schedule()

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Step the schedules that follow a metric of the validation set."""
        for own in self.by_name.values():
            own.update.evaluated(metrics)

    def facts(self) -> dict[str, Any]:
        """Return the facts about updates that a checkpoint records, for a resume to compare."""
        return {"phases": [*self._settings()]}

    def _settings(self) -> Iterator[dict[str, Any]]:
        for name, own in self.by_name.items():
            yield {
                "name": name,
                "updates": own.updates,
                "clip_norm": own.optimize.clip_norm,
                "ema_decay": own.optimize.ema_decay,
                **own.update.facts(),
            }


class PhaseStates:
    """The saving and loading of each phase's optimizer and schedule. See ``OptimizerState``.

    In the record, the states form a list in the order of the phases; the name of a tensor is
    prefixed with the name of its phase and a slash.

    Args:
        update: the updates of all phases.
    """

    def __init__(self, update: PhaseUpdates) -> None:
        self._update = update

    @property
    def kind(self) -> str:
        """The optimizers as text for people, compared first by a resume."""
        return ", ".join(f"{name}: {own.state.kind}" for name, own in self._update.by_name.items())

    def save(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return tensors by name, shared with the optimizers, and entries of the record.

        Raises:
            CheckpointError: an optimizer holds state that cannot be saved.
        """
        tensors: dict[str, torch.Tensor] = {}
        phases = self._update.facts()["phases"]
        for entry, own in zip(phases, self._update.by_name.values(), strict=True):
            state, kept = own.state.save()
            tensors |= {f"{entry['name']}/{key}": value for key, value in state.items()}
            entry |= kept
        return tensors, {"optimizer": self.kind, "optimizer_numbers": {}, "phases": phases}

    def loadable(
        self, tensors: Mapping[str, torch.Tensor], record: Mapping[str, Any], path: Path
    ) -> LoadablePhases:
        """Return the argument of ``load``, made from the result of ``save``. Nothing is changed.

        Raises:
            MisfitError: the state is of other phases, or of other optimizers.
        """
        saved = {entry["name"]: entry for entry in record.get("phases") or ()}
        ours = self._update.by_name
        if [*saved] != [*ours]:
            was = ", ".join(map(printable, saved)) or "none"
            raise MisfitError(
                path,
                f"it was trained with phases {was}, and this run has {', '.join(ours)}",
                fix="use the same, or choose another run_dir",
            )
        odd = next((key for key in tensors if key.partition("/")[0] not in ours), None)
        if odd is not None:
            raise MisfitError(path, f"optimizer state {odd!r:.80} is of no phase")
        states = {}
        for name, own in ours.items():
            # A schedule counts the updates of its own phase.
            entry = {**saved[name], "global_step": saved[name]["updates"]}
            part = {
                key.removeprefix(f"{name}/"): value
                for key, value in tensors.items()
                if key.startswith(f"{name}/")
            }
            states[name] = own.state.loadable(part, entry, path)
        return LoadablePhases(states, {name: entry["updates"] for name, entry in saved.items()})

    def load(self, saved: LoadablePhases) -> None:
        """Load the result of ``loadable``, except for values now set differently by the script."""
        for name, own in self._update.by_name.items():
            own.state.load(saved.states[name])
            own.updates = saved.updates[name]
