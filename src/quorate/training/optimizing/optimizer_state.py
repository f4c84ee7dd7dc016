"""The saved state of an optimizer and a schedule, and how checkpoints save and load the state.

Element-wise optimizers of torch work on flat vectors, and have their state saved per parameter, by
name of the parameter. The state of all further optimizers comes from their own ``state_dict`` and
from attributes. Values of groups (a learning rate set by user code, counters) are saved for all
optimizers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from quorate.errors import CheckpointError, MisfitError
from quorate.replica.digest import content
from quorate.replica.model import frozen
from quorate.replica.notes import Notes
from quorate.replica.witness.kept import Kept, changed, kept_beside
from quorate.services.checkpoints.trees import TreeDecoder, TreeEncoder, require_like
from quorate.training.optimizing.attributes import (
    Attribute,
    attributes,
    is_state_of,
    load_into,
    optimizers,
    place_of_new,
    placed_like,
    put,
    state_of,
)
from quorate.training.optimizing.known_optimizers import storable_values, values_of
from quorate.training.optimizing.scheduled_optimizer import ScheduledOptimizer


class LoadableOptimizer(NamedTuple):
    """The optimizer state of a checkpoint, read and compared."""

    by_name: dict[torch.Tensor, dict[str, Any]] | None  # state by the optimizer's tensors
    own: dict[str, Any] | None  # or the result of the optimizer's own state_dict
    attributes: dict[str, Any]
    groups: list[dict[str, Any]]  # values; empty if the groups differ
    schedule: dict[str, Any] | None
    record: Mapping[str, Any]


class OptimizerState:
    """The saving and loading of the state of an optimizer and of its schedule.

    Args:
        scheduled: the optimizer, as made by the script, and its schedule.
        model: the coordinator's model.
        notes: messages for the user, on optimizer state lost by a resume.
    """

    def __init__(self, scheduled: ScheduledOptimizer, model: torch.nn.Module, notes: Notes) -> None:
        named = (*model.named_modules(), *model.named_parameters(), *model.named_buffers())
        self._carried = {id(part): name for name, part in named}
        self._scheduled, self._optimizer = scheduled, scheduled.optimizer
        self._user_optimizer = scheduled.optimizer.user_optimizer
        self._frozen = frozen(model)
        self._notes = notes
        # As made by the script: a value made differently at a resume was edited by the user.
        self._made = {name: self._mark(value) for name, (value, _) in self._attributes().items()}
        self._elsewhere = self._kept_elsewhere()

    @property
    def kind(self) -> str:
        """The optimizer as text for people, compared first by a resume."""
        return type(self._user_optimizer).__name__

    # --- saving -----------------------------------------------------------------------------------

    def save(self, *, with_spread: bool = True) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return tensors by name, shared with the optimizer, and entries of the record.

        The name of a tensor begins with the prefix of the optimizer.

        Args:
            with_spread: whether to return the state per parameter, if owners have slices of it.

        Raises:
            CheckpointError: the optimizer holds state that cannot be saved.
        """
        encoder = TreeEncoder(self._optimizer.names)
        own: Any = None
        numbers: dict[str, dict[str, Any]] = {}
        if self._optimizer.uses_vectors:
            is_left_out = self._optimizer.is_spread and not with_spread
            state = {} if is_left_out else self._optimizer.state()
            for name, entries in state.items():
                for entry, value in entries.items():
                    if isinstance(value, torch.Tensor):
                        encoder.tensors[f"{entry}.{name}"] = value
                    else:
                        numbers.setdefault(name, {})[entry] = value
        else:
            own = encoder.encode(self._user_optimizer.state_dict(), "optimizer.state_dict()")
        groups = []
        for number, (group, names) in enumerate(
            zip(self._user_optimizer.param_groups, self._optimizer.groups, strict=True)
        ):
            where = f"optimizer.param_groups[{number}]"
            values = storable_values(group).items()
            kept = {key: encoder.encode(value, f"{where}.{key}") for key, value in values}
            groups.append({"names": names, "values": kept})
        record = {
            "optimizer": self.kind,
            "optimizer_numbers": numbers,
            "optimizer_state": own,
            "optimizer_attributes": self._encoded_attributes(encoder),
            "optimizer_groups": groups,
            "schedule_state": self._encoded_schedule(encoder),
        }
        prefix = self._optimizer.prefix
        return {f"{prefix}{key}": value for key, value in encoder.tensors.items()}, record

    def _encoded_attributes(self, encoder: TreeEncoder) -> dict[str, Any]:
        """Return the attributes that have changed since the optimizer was made."""
        encoded = {}
        for name, (value, _) in self._attributes().items():
            mark = self._mark(value)
            is_seen = mark is not None or isinstance(value, Optimizer)  # else refused, not skipped
            if is_seen and mark != self._made.get(name, ""):
                state = state_of(value, self._optimizer.names)
                encoded[name] = encoder.encode(state, f"optimizer.{name}")
        self._doubt()
        return encoded

    def _doubt(self) -> None:
        """Report values that change with the optimizer's steps and lie outside its attributes."""
        for name in changed(self._elsewhere, now := self._kept_elsewhere()):
            self._notes.doubt(
                f"{name} changes when the optimizer steps, and no checkpoint saves it: after a "
                "resume it has its first value; keep the value in an attribute of the optimizer"
            )
        self._elsewhere = now

    def _encoded_schedule(self, encoder: TreeEncoder) -> Any:
        """Return the state of the schedule; None if a resume replays the schedule."""
        if self._scheduled.scheduler is None:
            return None
        try:
            return encoder.encode(self._scheduled.scheduler.state_dict(), "schedule.state_dict()")
        except CheckpointError as error:
            if not self._scheduled.can_replay:
                raise
            self._notes.add(
                f"checkpoints lack the schedule, so a resume replays it from step 0: {error}"
            )
            return None

    # --- loading ----------------------------------------------------------------------------------

    def loadable(
        self, tensors: Mapping[str, torch.Tensor], record: Mapping[str, Any], path: Path
    ) -> LoadableOptimizer:
        """Return the argument of ``load``, made from the result of ``save``. Nothing is changed.

        Args:
            tensors: the tensors of all optimizers.
            path: path of the checkpoint, for messages.

        Raises:
            MisfitError: the state is of another optimizer.
        """
        prefix = self._optimizer.prefix
        tensors = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        decoder = TreeDecoder(tensors, self._optimizer.parameters)
        listed = [name for group in record.get("optimizer_groups", ()) for name in group["names"]]
        for name in listed:
            self._require_trainable(path, name)
        groups, own, by_name = self._groups(record), None, None
        is_by_name = record.get("optimizer_state") is None
        entries = self._by_name(tensors, record, path) if is_by_name else {}
        if not is_by_name:
            self._require_same_names(record, path)
        odd = [name for name, state in entries.items() if state and listed.count(name) != 1]
        if odd and "optimizer_groups" in record:
            raise MisfitError(path, f"{odd[0]!r:.80} has optimizer state, and not one group")
        try:
            if is_by_name:
                by_name = self._optimizer.loadable(entries)
            else:
                own = decoder.decode(record["optimizer_state"])
                _require_state_dict(own, self._user_optimizer)
            trees = record.get("optimizer_attributes", {})
            named = {name: decoder.decode(tree) for name, tree in trees.items()}
            self._require_fitting(named)
            decoded = [{k: decoder.decode(v) for k, v in g["values"].items()} for g in groups]
            for values, group in zip(decoded, self._user_optimizer.param_groups, strict=False):
                require_like(values, storable_values(group), "a parameter group")
            schedule = decoder.decode(record.get("schedule_state"))
            if schedule is not None and not self._is_edited(record):
                assert self._scheduled.scheduler is not None
                require_like(schedule, self._scheduled.scheduler.state_dict(), "schedule")
            return LoadableOptimizer(by_name, own, named, decoded, schedule, record)
        except CheckpointError as error:
            raise MisfitError(path, error) from error

    def load(self, saved: LoadableOptimizer) -> None:
        """Load the result of ``loadable``, except for values now made differently by the script."""
        record = saved.record
        fresh = [_values(group) for group in self._user_optimizer.param_groups]
        # 1. The state and the attributes.
        if saved.by_name is not None:
            self._optimizer.load(saved.by_name)
        else:
            assert saved.own is not None
            load_into(self._user_optimizer, saved.own)
        own = self._attributes()
        for name, value in saved.attributes.items():
            if name in own:
                put(own[name], value, self._optimizer.names)
            elif (place := place_of_new(self._user_optimizer, name)) is not None:
                place(value)  # the attribute was created in a step
        # 2. The schedule, restored; or replayed from the schedule that the script makes now.
        for group, values in zip(self._user_optimizer.param_groups, fresh, strict=True):
            group.update(values)
        edited = self._edited(record)
        scheduler = self._scheduled.scheduler
        if scheduler is None:
            for keys in edited if record.get("schedule") else ():
                keys.add("lr")  # the learning rate is the script's again
        elif saved.schedule is not None and not self._is_edited(record):
            scheduler.load_state_dict(saved.schedule)
        elif self._scheduled.can_replay:
            for _ in range(record["global_step"]):
                self._scheduled.skip()
            for keys, group, values in zip(
                edited, self._user_optimizer.param_groups, fresh, strict=True
            ):
                scheduled = {key for key, value in values.items() if not _same(group[key], value)}
                keys |= {"lr"} | scheduled
        # 3. The values of groups, except those changed by the script or by a replayed schedule.
        for group, saved_values, keys in zip(
            self._user_optimizer.param_groups, saved.groups, edited, strict=False
        ):
            for key, value in saved_values.items():
                if key not in keys:
                    group[key] = placed_like(value, group.get(key))

    def _by_name(
        self, tensors: Mapping[str, torch.Tensor], record: Mapping[str, Any], path: Path
    ) -> dict[str, dict[str, Any]]:
        """Return the state that is saved per parameter, by name of the parameter."""
        entries: dict[str, dict[str, Any]] = {name: {} for name in self._optimizer.parameters}
        for key, value in tensors.items():
            if is_in_a_tree(key):
                continue
            entry, _, name = key.partition(".")
            self._require_trainable(path, name)
            entries[name][entry] = value
        for name, values in record["optimizer_numbers"].items():
            self._require_trainable(path, name)
            if twice := entries[name].keys() & values.keys():
                raise MisfitError(
                    path,
                    f"optimizer state {min(twice)!r} of {name!r} is there twice",
                )
            entries[name].update(values)
        return entries

    def _require_trainable(self, path: Path, name: str) -> None:
        if name not in self._optimizer.parameters:
            # A frozen parameter was trained before. A CheckpointError ends the search for a
            # checkpoint: an older one may fit, but resuming from it would lose the later updates.
            kind = CheckpointError if name in self._frozen else MisfitError
            raise kind(
                path,
                f"optimizer state of {name!r:.80}, which this run's optimizer does not train",
                fix="give each optimizer the parameters of the first run",
            )

    def _require_same_names(self, record: Mapping[str, Any], path: Path) -> None:
        saved = [name for group in record["optimizer_groups"] for name in group["names"]]
        own = [name for names in self._optimizer.groups for name in names]
        if saved != own:
            odd = next(
                pair for pair in zip_longest(saved, own, fillvalue="none") if pair[0] != pair[1]
            )
            raise CheckpointError(
                path,
                f"the optimizer had parameter {odd[0]!r} where this run has {odd[1]!r}",
                fix="use the groups and the frozen parameters of the first run",
            )

    def _require_fitting(self, values: Mapping[str, Any]) -> None:
        """Check that each value has an attribute, or can become a new attribute."""
        own = self._attributes()
        for name, value in values.items():
            there = own[name].value if name in own else None
            if name not in own:
                if self._optimizer.uses_vectors or place_of_new(self._user_optimizer, name) is None:
                    raise CheckpointError("optimizer state", f"it has no attribute {name!r:.80}")
            elif isinstance(there, Optimizer):
                _require_state_dict(value, there)
            elif isinstance(there, torch.Generator):
                if not is_state_of(there, value):
                    raise CheckpointError("optimizer state", f"{name} is no state of a generator")
            elif (state := state_of(there, self._optimizer.names)) is not there:
                require_like(value, state, f"optimizer.{name}")

    def _groups(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the groups of a record if equal to the present groups; else an empty list."""
        groups: list[dict[str, Any]] = list(record.get("optimizer_groups", ()))
        same = [group["names"] for group in groups] == self._optimizer.groups
        return groups if same else []

    def _edited(self, record: Mapping[str, Any]) -> list[set[str]]:
        """Return per group the keys of values that the script makes differently than before."""
        edited: list[set[str]] = [set() for _ in self._user_optimizer.param_groups]
        now = self._scheduled.hyperparameters[1:]
        for keys, new, old in zip(
            edited, now, record.get("hyperparameters", now)[1:], strict=False
        ):
            changed = {key for key in new if new[key] != old.get(key)}
            keys |= changed | {f"initial_{key}" for key in changed}
        return edited

    def _is_edited(self, record: Mapping[str, Any]) -> bool:
        """Return whether the script makes the optimizer or the schedule differently than before."""
        return (
            record.get("hyperparameters") != self._scheduled.hyperparameters
            or record.get("schedule") != type(self._scheduled.scheduler).__name__
        )

    # --- attributes -------------------------------------------------------------------------------

    def _attributes(self) -> dict[str, Attribute]:
        """Return the attributes beyond those of every optimizer."""
        return {} if self._optimizer.uses_vectors else attributes(self._user_optimizer)

    def _mark(self, value: Any) -> str | None:
        """Return a digest of a value, to detect changes; None if the value cannot be saved."""
        encoder = TreeEncoder(self._optimizer.names)
        try:
            state = state_of(value, self._optimizer.names)
            tree = json.dumps(encoder.encode(state, "value"), sort_keys=True)
        except CheckpointError:
            return None
        total = hashlib.sha256(tree.encode())
        for tensor in encoder.tensors.values():
            total.update(content(tensor).data)
        return total.hexdigest()

    def _kept_elsewhere(self) -> Kept:
        """Return hashes of state of the optimizer and the schedule outside of any checkpoint.

        Such state may be a function or a logger, an object with a counter, a variable of the
        script, or an attribute of a parameter.
        """
        within = optimizers(self._user_optimizer)
        carried = {**self._carried, **{id(o): type(o).__name__ for o in within}}
        schedule, kind = self._scheduled.scheduler, type(self._user_optimizer).__name__
        own = self._attributes().items()
        return kept_beside(
            within if schedule is None else [*within, schedule],
            {f"{kind}.{n}": value for n, (value, _) in own if self._mark(value) is None},
            self._optimizer.parameters,
            carried,
        )


def is_in_a_tree(key: str) -> bool:
    """Return whether a saved tensor belongs to a group, an attribute or the schedule.

    All other tensors are per parameter.
    """
    return key.partition(".")[0] in ("optimizer", "schedule")


def _values(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a group's values without its parameters."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in values_of(group).items()
    }


def _same(left: Any, right: Any) -> bool:
    are_tensors = isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
    return torch.equal(left, right) if are_tensors else bool(left == right)


def _require_state_dict(state: Any, optimizer: Optimizer) -> None:
    """Check a state dict before an optimizer loads it: a forged dict could raise any exception."""
    groups = state.get("param_groups") if isinstance(state, dict) else None
    own = [len(group["params"]) for group in optimizer.param_groups]
    if (
        not isinstance(groups, list)
        or not isinstance(state.get("state"), dict)
        or not all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups)
        or [len(group["params"]) for group in groups] != own
    ):
        raise CheckpointError(f"no state dict of {type(optimizer).__name__}", f"{state!r:.80}")
