"""The phases of a run: each has its own optimizer, schedule and clip. A plain run has one phase.

The parameters of all models lie in one flat vector, and an optimizer has the stretches of its own
parameters: those trained by a phase, or a part of them where an update has several optimizers. So
the code for vectors, sums, snapshots and checkpoints does not depend on phases. An update belongs
to one phase: schedules, averages and optimizers count the updates of their own phase only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from quorate.errors import MisfitError, SettingError
from quorate.machine.text import printable
from quorate.replica.buffers import Buffers
from quorate.replica.loss import Loss
from quorate.replica.model import trainable
from quorate.replica.notes import Notes
from quorate.replica.phases.losses import PhaseLosses
from quorate.replica.sparse.found import GradKinds, no_rows
from quorate.training.optimizing.average import Average
from quorate.training.optimizing.closure import needs_closure
from quorate.training.optimizing.optimize import Optimize, assign
from quorate.training.optimizing.optimizer import FlatOptimizer
from quorate.training.optimizing.optimizer_state import LoadableOptimizer, OptimizerState
from quorate.training.optimizing.owners import Owners
from quorate.training.optimizing.scheduled_optimizer import ScheduledOptimizer
from quorate.training.optimizing.update import Update
from quorate.training.owners.parted_optimizer import PartedOptimizer
from quorate.training.owners.spread_optimizer import SpreadOptimizer


class Phases:
    """The updates and optimizers of all phases, and the saving and loading of their states.

    Args:
        optimize: how the updates of each phase are made, by name; of a plain run, by None.
        loss: the loss; of a run with phases, the losses of the phases.
        model: the model; its trainable parameters are views of the owners' ``parameters``.
        owners: the owners of the parameters.
        buffers: the buffers of the model.
        average: the average of the parameters, if some phase averages its parameters.
        notes: messages for the user.

    Raises:
        SettingError: an optimizer cannot work at all, or not in a phase.
    """

    def __init__(
        self,
        optimize: Mapping[str | None, Optimize],
        loss: Loss,
        model: torch.nn.Module,
        owners: Owners,
        buffers: Buffers,
        average: Average | None,
        notes: Notes,
    ) -> None:
        self._model, self._owners = model, owners
        self.updates: dict[str | None, Update] = {}
        self._states: dict[str | None, list[OptimizerState]] = {}
        for name, choice in optimize.items():
            names, own = None, average
            if name is not None:
                assert isinstance(loss, PhaseLosses)
                names = loss.trained(model, name)
                if average is not None:
                    # With a decay of 0 the shadow equals the parameters: for those alone that no
                    # phase averages.
                    decay = choice.ema_decay or 0.0
                    others = [] if decay else [n for n in loss.by_name if optimize[n].ema_decay]
                    averaged = {each for other in others for each in loss.trained(model, other)}
                    own = average.of({*names} - averaged, decay)
            scheduled = self._made(choice, name, names)
            for optimizer in (each.optimizer for each in scheduled):
                if isinstance(optimizer, PartedOptimizer) and not optimizer.uses_vectors:
                    kind = type(optimizer.user_optimizer).__name__
                    is_only = not choice.has_optimizer_list
                    what = "all updates" if is_only else f"the updates of {kind}"
                    state = "the whole optimizer state" if is_only else "all of its state"
                    notes.add(
                        f"one process makes {what} and holds {state}, because {kind} does not work "
                        "element by element"
                    )
            self.updates[name] = Update(owners, scheduled, buffers, choice, own)
            self._states[name] = [OptimizerState(each, model, notes) for each in scheduled]

    def _made(
        self, optimize: Optimize, phase: str | None, names: Collection[str] | None
    ) -> list[ScheduledOptimizer]:
        """Return the optimizers of a phase, in order.

        Args:
            names: names of the parameters of the phase; None for all.

        Raises:
            SettingError: an optimizer does not work beside others.
        """
        of = "" if phase is None else f" in phase {phase!r}"
        assignments, made = optimize.assignments, list[ScheduledOptimizer]()
        own: Sequence[Collection[str] | None] = [names]
        if optimize.has_optimizer_list:
            parameters = trainable(self._model)
            trained = {n: p for n, p in parameters.items() if names is None or n in names}
            own = assign(assignments, trained, of)
        for number, (each, names) in enumerate(zip(assignments, own, strict=True)):
            prefix = "" if phase is None else f"{phase}/"
            prefix += f"{number}/" if optimize.has_optimizer_list else ""
            over = each.optimizer, self._model, self._owners.parameters
            optimizer = self._owners.new_optimizer(*over, names, prefix)
            self._owners.add(optimizer, shards=optimize.shard_optimizer)
            if names is not None and (
                optimizer.has_modes or needs_closure(optimizer.user_optimizer)
            ):
                entry = f" for {each.text}" if optimize.has_optimizer_list else ""
                got = f"{type(optimizer.user_optimizer).__name__}{entry}{of}"
                expected = "optimizers that step from one gradient, and have one set of weights"
                raise SettingError("optimizer", got, expected, "take another, Adam for example")
            metric = optimize.schedule_metric
            made.append(ScheduledOptimizer(optimizer, each.schedule, metric, each.clip_norm))
        return made

    @property
    def optimizers(self) -> list[FlatOptimizer]:
        """The optimizers of all phases, in order."""
        return [each.optimizer for update in self.updates.values() for each in update.scheduled]

    @property
    def spread(self) -> list[SpreadOptimizer]:
        """The optimizers whose state owners of slices may have."""
        made = (each for each in self.optimizers if isinstance(each, SpreadOptimizer))
        return [each for each in made if each.is_spread]

    @contextmanager
    def whole_state(self) -> Iterator[None]:
        """Fetch the states of all optimizers to this process inside the block. Blocks."""
        with ExitStack() as stack:
            for optimizer in self.spread:
                stack.enter_context(optimizer.whole_state())
            yield

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all phases, in order."""
        return [group for each in self.optimizers for group in each.param_groups]

    def kept_by_rows(self, found: GradKinds) -> frozenset[str]:
        """Return the parameters with gradients by rows in all phases; see ``FlatOptimizer``.

        Raises:
            SettingError: an optimizer takes such a gradient, and the owners have slices of vectors.
        """
        kept = [(each.parameters, each.kept_by_rows(found)) for each in self.optimizers]
        refused, by_rows = self._owners.refuses_rows, [name for _, own in kept for name in own]
        if refused is not None and by_rows:
            raise no_rows(*refused, min(by_rows))
        dense = {name for ours, by_rows in kept for name in ours if name not in by_rows}
        return found.by_rows - dense

    def facts(self) -> dict[str, Any]:
        """Return the facts about updates that a checkpoint records, for a resume to compare."""
        if None in self.updates:
            return self.updates[None].facts()
        phases = [
            {
                "name": name,
                "updates": update.updates,
                "clip_norm": update.optimize.clip_norm,
                "ema_decay": update.optimize.ema_decay,
                **update.facts(),
            }
            for name, update in self.updates.items()
        ]
        return {"phases": phases}

    # --- checkpoints ------------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """The optimizers as text for people, compared first by a resume."""
        kinds = {name: self._kind(name) for name in self._states}
        return ", ".join(of if name is None else f"{name}: {of}" for name, of in kinds.items())

    def _kind(self, phase: str | None) -> str:
        return " + ".join(state.kind for state in self._states[phase])

    def save(self, *, with_spread: bool = True) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return tensors by name, shared with the optimizers, and entries of the record.

        In the record, the states of phases form a list in the order of the phases, and the states
        of a list of optimizers form a list. The name of a tensor is prefixed with the name of its
        phase and the number of its optimizer, each with a slash.

        Args:
            with_spread: whether to return the states per parameter that owners have slices of.

        Raises:
            CheckpointError: an optimizer holds state that cannot be saved.
        """
        tensors, records = dict[str, torch.Tensor](), dict[str | None, dict[str, Any]]()
        for name, states in self._states.items():
            saved = [state.save(with_spread=with_spread) for state in states]
            for own, _ in saved:
                tensors |= own
            records[name] = saved[0][1]
            if self.updates[name].optimize.has_optimizer_list:
                facts = self.updates[name].facts()["optimizers"]
                several = [fact | kept for fact, (_, kept) in zip(facts, saved, strict=True)]
                records[name] = _record(self._kind(name), optimizers=several)
        if None in records:
            return tensors, records[None]
        phases = [facts | records[facts["name"]] for facts in self.facts()["phases"]]
        return tensors, _record(self.kind, phases=phases)

    def loadable(
        self, tensors: Mapping[str, torch.Tensor], record: Mapping[str, Any], path: Path
    ) -> list[list[LoadableOptimizer]]:
        """Return the argument of ``load``, made from the result of ``save``. Nothing is changed.

        Raises:
            MisfitError: the state is of other phases, or of other optimizers.
        """
        saved: dict[str | None, Mapping[str, Any]] = {None: record}
        if None not in self._states:
            # A schedule counts the updates of its own phase.
            phases = record.get("phases") or ()
            saved = {each["name"]: {**each, "global_step": each["updates"]} for each in phases}
        if [*saved] != [*self._states]:
            was = ", ".join(map(printable, saved)) or "none"
            now = ", ".join(map(str, self._states))
            raise MisfitError(
                path,
                f"it was trained with phases {was}, and this run has {now}",
                fix="use the same, or choose another run_dir",
            )
        found = [self._loadable(name, tensors, own, path) for name, own in saved.items()]
        prefixes = tuple(each.prefix for each in self.optimizers)
        if odd := next((key for key in tensors if not key.startswith(prefixes)), None):
            of = "optimizer" if None in saved else "phase"
            raise MisfitError(path, f"optimizer state {odd!r:.80} is of no {of}")
        return found

    def _loadable(
        self,
        phase: str | None,
        tensors: Mapping[str, torch.Tensor],
        record: Mapping[str, Any],
        path: Path,
    ) -> list[LoadableOptimizer]:
        several, saved = self.updates[phase].optimize.has_optimizer_list, record.get("optimizers")
        if several != (saved is not None):
            was, now = ("a list of optimizers", "one function")[:: -1 if several else 1]
            fix = "use the same, or choose another run_dir"
            raise MisfitError(path, f"it was trained with {was}, and this run has {now}", fix=fix)
        return [
            state.loadable(tensors, {**own, "global_step": record["global_step"]}, path)
            for state, own in zip(self._states[phase], saved or [record], strict=True)
        ]

    def load(self, saved: list[list[LoadableOptimizer]]) -> None:
        """Load the result of ``loadable``, except for values now set differently by the script."""
        for name, loadable in zip(self.updates, saved, strict=True):
            for state, own in zip(self._states[name], loadable, strict=True):
                state.load(own)
            self.updates[name].updates = loadable[0].record["global_step"]


def _record(kind: str, **states: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the entries of a record about several optimizers."""
    return {"optimizer": kind, "optimizer_numbers": {}, **states}
