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

from quorate.engines.collective.exchange import GradientExchange
from quorate.errors import MisfitError, SettingError
from quorate.machine.text import printable
from quorate.replica.buffers import Buffers
from quorate.replica.flat import Flat
from quorate.replica.loss import Loss
from quorate.replica.model import trainable
from quorate.replica.notes import Notes
from quorate.replica.phases.losses import PhaseLosses
from quorate.replica.sparse.found import Found
from quorate.training.optimizing.assignments import assign
from quorate.training.optimizing.average import Average
from quorate.training.optimizing.closure import needs_closure
from quorate.training.optimizing.optimize import Optimize
from quorate.training.optimizing.optimizer import FlatOptimizer, OptimizerFactory
from quorate.training.optimizing.optimizer_state import LoadableOptimizer, OptimizerState
from quorate.training.optimizing.phase_state import PhaseState, by_prefix
from quorate.training.optimizing.scheduled_optimizer import ScheduledOptimizer
from quorate.training.optimizing.sliced_optimizer import SlicedOptimizer
from quorate.training.optimizing.update import Update
from quorate.training.parts.parted_optimizer import PartedOptimizer
from quorate.training.serving.served_optimizer import ServedOptimizer


class Phases:
    """The updates and optimizers of all phases, and the saving and loading of their states.

    Args:
        optimize: how the updates of each phase are made, by name; of a plain run, by None.
        loss: the loss; of a run with phases, the losses of the phases.
        model: the model; its trainable parameters are views of ``parameters``.
        parameters: the parameters.
        buffers: the buffers of the model.
        average: the average of the parameters, if some phase averages its parameters.
        notes: messages for the user.
        exchange: the exchange of ranks, if they make updates together.
        served: whether servers make updates.
        parts: processes making an update, each of a part; parameters are shared if > 1.

    Raises:
        SettingError: an optimizer cannot work at all, or not in a phase.
    """

    def __init__(
        self,
        optimize: Mapping[str | None, Optimize],
        loss: Loss,
        model: torch.nn.Module,
        parameters: Flat,
        buffers: Buffers,
        average: Average | None,
        notes: Notes,
        exchange: GradientExchange | None,
        *,
        served: bool,
        parts: int,
    ) -> None:
        self._over, self._exchange = (model, parameters), exchange
        self._served, self._parts = served, parts
        self.updates: dict[str | None, Update] = {}
        self._states: dict[str | None, PhaseState] = {}
        for name, choice in optimize.items():
            names, own = None, average
            if name is not None:
                assert isinstance(loss, PhaseLosses)
                names = loss.trained(model, name)
            scheduled = self._made(choice, name, names)
            for optimizer in (each.optimizer for each in scheduled):
                if isinstance(optimizer, PartedOptimizer) and not optimizer.flat:
                    kind = type(optimizer.inner).__name__
                    is_only = not choice.has_several
                    what = "all updates" if is_only else f"the updates of {kind}"
                    state = "the whole optimizer state" if is_only else "all of its state"
                    notes.add(
                        f"one process makes {what} and holds {state}, because {kind} does not work "
                        "element by element"
                    )
            if average is not None and names is not None:
                # With a decay of 0 the shadow equals the parameters.
                own = average.of(names, choice.ema_decay or 0.0)
            self.updates[name] = update = Update(scheduled, buffers, choice, own)
            states = [OptimizerState(each, model, notes) for each in scheduled]
            self._states[name] = PhaseState(update, states)

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
        if optimize.has_several:
            parameters = trainable(self._over[0])
            trained = {n: p for n, p in parameters.items() if names is None or n in names}
            own = assign(assignments, trained, of)
        for number, (each, names) in enumerate(zip(assignments, own, strict=True)):
            prefix = "" if phase is None else f"{phase}/"
            prefix += f"{number}/" if optimize.has_several else ""
            shards = optimize.shard_optimizer
            optimizer = self._optimizer(each.optimizer, names, prefix, is_sharded=shards)
            if names is not None and (optimizer.has_modes or needs_closure(optimizer.inner)):
                entry = f" for {each.text}" if optimize.has_several else ""
                got = f"{type(optimizer.inner).__name__}{entry}{of}"
                expected = "optimizers that step from one gradient, and have one set of weights"
                raise SettingError("optimizer", got, expected, "take another, Adam for example")
            metric = optimize.schedule_metric
            made.append(ScheduledOptimizer(optimizer, each.schedule, metric, each.clip_norm))
        return made

    def _optimizer(
        self,
        factory: OptimizerFactory,
        names: Collection[str] | None,
        prefix: str,
        *,
        is_sharded: bool,
    ) -> FlatOptimizer:
        """Return an optimizer of the class for whoever makes the updates.

        Args:
            names: names of the parameters of the optimizer; None for all.
            prefix: prefix of the optimizer's tensors in checkpoints.
        """
        over = (factory, *self._over)
        if self._exchange is not None:
            return SlicedOptimizer(
                *over,
                exchange=self._exchange,
                is_sharded=is_sharded,
                names=names,
                prefix=prefix,
            )
        if self._served:
            return ServedOptimizer(*over)
        if self._parts > 1:
            return PartedOptimizer(*over, self._parts, names)
        return FlatOptimizer(*over, names)

    @property
    def optimizers(self) -> list[FlatOptimizer]:
        """The optimizers of all phases, in order."""
        return [each.optimizer for update in self.updates.values() for each in update.scheduled]

    @property
    def of_ranks(self) -> list[SlicedOptimizer]:
        """The optimizers of all phases, where the ranks of a collective make updates together."""
        return [each for each in self.optimizers if isinstance(each, SlicedOptimizer)]

    @property
    def sharded(self) -> list[SlicedOptimizer]:
        """The optimizers whose state each rank has for its slices alone."""
        return [each for each in self.of_ranks if each.is_sharded]

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Fetch the states of all optimizers to this process inside the block. Blocks."""
        with ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(optimizer.whole())
            yield

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all phases, in order."""
        return [group for each in self.optimizers for group in each.param_groups]

    def kept_by_rows(self, found: Found) -> frozenset[str]:
        """Return the parameters with gradients by rows in all phases; see ``FlatOptimizer``."""
        kept = [(each.parameters, each.kept_by_rows(found)) for each in self.optimizers]
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
        return ", ".join(
            state.kind if name is None else f"{name}: {state.kind}"
            for name, state in self._states.items()
        )

    def save(self, *, with_sharded: bool = True) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return tensors by name, shared with the optimizers, and entries of the record.

        In the record, the states of phases form a list in the order of the phases; the name of a
        tensor is prefixed with the name of its phase and a slash.

        Args:
            with_sharded: whether to return the states per parameter that ranks have slices of.

        Raises:
            CheckpointError: an optimizer holds state that cannot be saved.
        """
        if None in self._states:
            return self._states[None].save(with_sharded=with_sharded)
        tensors, facts = dict[str, torch.Tensor](), self.facts()
        for entry, own in zip(facts["phases"], self._states.values(), strict=True):
            state, kept = own.save(with_sharded=with_sharded)
            tensors |= {f"{entry['name']}/{key}": value for key, value in state.items()}
            entry |= kept
        return tensors, {"optimizer": self.kind, "optimizer_numbers": {}, **facts}

    def loadable(
        self, tensors: Mapping[str, torch.Tensor], record: Mapping[str, Any], path: Path
    ) -> list[list[LoadableOptimizer]]:
        """Return the argument of ``load``, made from the result of ``save``. Nothing is changed.

        Raises:
            MisfitError: the state is of other phases, or of other optimizers.
        """
        if None in self._states:
            return [self._states[None].loadable(tensors, record, path)]
        saved = {entry["name"]: entry for entry in record.get("phases") or ()}
        if [*saved] != [*self._states]:
            was = ", ".join(map(printable, saved)) or "none"
            now = ", ".join(map(str, self._states))
            raise MisfitError(
                path,
                f"it was trained with phases {was}, and this run has {now}",
                fix="use the same, or choose another run_dir",
            )
        parts = by_prefix(tensors, saved, "phase", path)
        # A schedule counts the updates of its own phase.
        return [
            state.loadable(own, {**entry, "global_step": entry["updates"]}, path)
            for state, own, entry in zip(
                self._states.values(), parts.values(), saved.values(), strict=True
            )
        ]

    def load(self, saved: list[list[LoadableOptimizer]]) -> None:
        """Load the result of ``loadable``, except for values now set differently by the script."""
        for name, own in zip(self.updates, saved, strict=True):
            self._states[name].load(own)
            self.updates[name].updates = own[0].record["global_step"]
