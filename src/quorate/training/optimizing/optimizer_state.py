"""What outlives a process of an optimizer and its schedule: saved, and loaded again.

Element-wise optimizers of torch's have their state per parameter, under its name, as they work on
flat vectors. All others are asked for it: by their own ``state_dict``, and what they keep in other
attributes of theirs. Values of groups (a learning rate that user code set, counters) are of all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from quorate.errors import CheckpointError, MisfitError
from quorate.replica.digest import content
from quorate.replica.notes import Notes
from quorate.services.checkpoints.trees import Decoder, Encoder, require_like
from quorate.training.optimizing.optimizer import FlatOptimizer
from quorate.training.optimizing.standard_attributes import standard_attributes
from quorate.training.optimizing.update import Update


class LoadableOptimizer(NamedTuple):
    """What a checkpoint has of an optimizer, read and compared."""

    by_name: dict[torch.Tensor, dict[str, Any]] | None  # state, by the optimizer's tensors
    own: dict[str, Any] | None  # or what its own state_dict gave
    attributes: dict[str, Any]
    groups: list[dict[str, Any]]  # values; empty if the groups were others
    schedule: dict[str, Any] | None
    record: Mapping[str, Any]


class OptimizerState:
    """Saves and loads the state of an optimizer, and of its schedule.

    Args:
        optimizer: as it was made.
        update: that makes it step, and has the schedule.
        frozen: names of the parameters that are not trained.
        notes: for the user: what of an optimizer is lost at a resume.
    """

    def __init__(
        self, optimizer: FlatOptimizer, update: Update, frozen: Collection[str], notes: Notes
    ) -> None:
        self._optimizer = optimizer
        self._inner = optimizer.inner
        self._update = update
        self._frozen = frozen
        self._notes = notes
        # As the script made them: what it makes otherwise at a resume, the user has edited.
        self._made_attributes = {n: self._mark(v) for n, v in self._attributes().items()}
        self._changes = {n: _changes(v) for n, v in self._attributes().items()}

    # --- saving -----------------------------------------------------------------------------------

    def save(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return tensors by name, which are the optimizer's own, and entries of the record.

        Raises:
            CheckpointError: the optimizer keeps what cannot be saved.
        """
        encoder = Encoder(self._optimizer.names)
        own: Any = None
        numbers: dict[str, dict[str, Any]] = {}
        if self._optimizer.flat:
            for name, entries in self._optimizer.state().items():
                for entry, value in entries.items():
                    if isinstance(value, torch.Tensor):
                        encoder.tensors[f"{entry}.{name}"] = value
                    else:
                        numbers.setdefault(name, {})[entry] = value
        else:
            own = encoder.encode(self._inner.state_dict(), "optimizer.state_dict()")
        groups = [
            {
                "names": names,
                "values": self._encoded_values(group, number, encoder),
            }
            for number, (group, names) in enumerate(
                zip(self._inner.param_groups, self._optimizer.groups, strict=True)
            )
        ]
        return encoder.tensors, {
            "optimizer": type(self._inner).__name__,
            "optimizer_numbers": numbers,
            "optimizer_state": own,
            "optimizer_attributes": self._encoded_attributes(encoder),
            "optimizer_groups": groups,
            "schedule_state": self._encoded_schedule(encoder),
        }

    def _encoded_values(
        self, group: Mapping[str, Any], number: int, encoder: Encoder
    ) -> dict[str, Any]:
        values = {}
        for key, value in group.items():
            if key == "params" or callable(value):  # the script makes a function again
                continue
            values[key] = encoder.encode(value, f"optimizer.param_groups[{number}].{key}")
        return values

    def _encoded_attributes(self, encoder: Encoder) -> dict[str, Any]:
        """Return those that have changed since the optimizer was made."""
        encoded = {}
        for name, value in self._attributes().items():
            mark = self._mark(value)
            if mark is None:
                # It may be a function or a logger, or a class of its own that counts.
                if _changes(value) != self._changes.get(name):
                    kind = type(self._inner).__name__
                    self._notes.doubt(
                        f"{kind}.{name}, a {type(value).__name__}, changes as the optimizer steps "
                        "and is not saved: after a resume it is as the script makes it"
                    )
                continue
            if mark == self._made_attributes.get(name):
                continue
            state = value.state_dict() if isinstance(value, Optimizer) else value
            encoded[name] = encoder.encode(state, f"optimizer.{name}")
        return encoded

    def _encoded_schedule(self, encoder: Encoder) -> Any:
        """Return the state of the schedule; None where it is to be replayed."""
        if self._update.scheduler is None:
            return None
        try:
            return encoder.encode(self._update.scheduler.state_dict(), "schedule.state_dict()")
        except CheckpointError as error:
            if not self._update.can_replay:
                raise
            self._notes.add(f"a resume steps through the schedule from its beginning: {error}")
            return None

    # --- loading ----------------------------------------------------------------------------------

    def loadable(
        self, tensors: Mapping[str, torch.Tensor], record: Mapping[str, Any], path: Path
    ) -> LoadableOptimizer:
        """Return what ``load`` takes, of what ``save`` gave. Nothing is changed.

        Args:
            path: of the checkpoint, for messages.

        Raises:
            MisfitError: it is of another optimizer.
        """
        decoder = Decoder(tensors, self._optimizer.parameters)
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
            raise MisfitError(f"{path}: {odd[0]!r:.80} has optimizer state, and not one group")
        try:
            if is_by_name:
                by_name = self._optimizer.loadable(entries)
            else:
                own = decoder.decode(record["optimizer_state"])
                _require_state_dict(own, self._inner)
            attributes = record.get("optimizer_attributes", {})
            if odd := attributes.keys() - self._made_attributes.keys():
                raise CheckpointError(f"optimizer state: it has no attribute {min(odd)!r}")
            decoded = [{k: decoder.decode(v) for k, v in g["values"].items()} for g in groups]
            for values, group in zip(decoded, self._inner.param_groups, strict=False):
                made = {k: v for k, v in group.items() if k != "params" and not callable(v)}
                require_like(values, made, "a parameter group")
            schedule = decoder.decode(record.get("schedule_state"))
            if schedule is not None and not self._is_edited(record):
                assert self._update.scheduler is not None
                require_like(schedule, self._update.scheduler.state_dict(), "schedule")
            named = {name: decoder.decode(tree) for name, tree in attributes.items()}
            return LoadableOptimizer(by_name, own, named, decoded, schedule, record)
        except CheckpointError as error:
            raise MisfitError(f"{path}: {error}") from error

    def load(self, saved: LoadableOptimizer) -> None:
        """Take what ``loadable`` gave, but for what the script makes otherwise now."""
        record = saved.record
        fresh = [_values(group) for group in self._inner.param_groups]
        # 1. The state, and what else it keeps.
        if saved.by_name is not None:
            self._optimizer.load(saved.by_name)
        else:
            assert saved.own is not None
            _load_into(self._inner, saved.own)
        for name, value in saved.attributes.items():
            self._load_attribute(name, value)
        # 2. The schedule, as it was; or stepped through anew, from how the script makes it now.
        for group, values in zip(self._inner.param_groups, fresh, strict=True):
            group.update(values)
        edited = self._edited(record)
        scheduler = self._update.scheduler
        if scheduler is None:
            for keys in edited if record.get("schedule") else ():
                keys.add("lr")  # it is the script's again
        elif saved.schedule is not None and not self._is_edited(record):
            scheduler.load_state_dict(saved.schedule)
        elif self._update.can_replay:
            for _ in range(record["global_step"]):
                self._update.skip()
            for keys, group, values in zip(edited, self._inner.param_groups, fresh, strict=True):
                scheduled = {key for key, value in values.items() if not _same(group[key], value)}
                keys |= {"lr"} | scheduled
        # 3. What groups had, but for what the script or a schedule stepped through has changed.
        for group, saved_values, keys in zip(
            self._inner.param_groups, saved.groups, edited, strict=False
        ):
            for key, value in saved_values.items():
                if key not in keys:
                    _put(group, key, value)

    def _by_name(
        self, tensors: Mapping[str, torch.Tensor], record: Mapping[str, Any], path: Path
    ) -> dict[str, dict[str, Any]]:
        """Return state that is saved per parameter, under its name."""
        entries: dict[str, dict[str, Any]] = {name: {} for name in self._optimizer.parameters}
        for key, value in tensors.items():
            entry, _, name = key.partition(".")
            if entry in ("optimizer", "schedule"):
                continue  # of a tree
            self._require_trainable(path, name)
            entries[name][entry] = value
        for name, values in record["optimizer_numbers"].items():
            self._require_trainable(path, name)
            if twice := entries[name].keys() & values.keys():
                raise MisfitError(
                    f"{path}: optimizer state {min(twice)!r} of {name!r} is there twice"
                )
            entries[name].update(values)
        return entries

    def _require_trainable(self, path: Path, name: str) -> None:
        if name not in self._optimizer.parameters:
            # A frozen one was trained before: another checkpoint may fit, and is not what was left.
            kind = CheckpointError if name in self._frozen else MisfitError
            raise kind(f"{path}: optimizer state of {name!r:.80}, which is no trainable parameter")

    def _require_same_names(self, record: Mapping[str, Any], path: Path) -> None:
        saved = [name for group in record["optimizer_groups"] for name in group["names"]]
        own = [name for names in self._optimizer.groups for name in names]
        if saved != own:
            odd = next(
                pair for pair in zip_longest(saved, own, fillvalue="none") if pair[0] != pair[1]
            )
            raise CheckpointError(
                f"{path}: the optimizer had parameter {odd[0]!r} where it has {odd[1]!r} now; use "
                "the groups and the frozen parameters of the first run"
            )

    def _load_attribute(self, name: str, value: Any) -> None:
        own = getattr(self._inner, name, None)
        if isinstance(own, Optimizer):  # one that is wrapped, and may share what it has
            shares = own.param_groups is self._inner.param_groups
            _load_into(own, value)
            if shares:
                own.param_groups = self._inner.param_groups
        else:
            setattr(self._inner, name, value)

    def _groups(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the groups of a record, if they are these; none of an older checkpoint."""
        groups: list[dict[str, Any]] = list(record.get("optimizer_groups", ()))
        same = [group["names"] for group in groups] == self._optimizer.groups
        return groups if same else []

    def _edited(self, record: Mapping[str, Any]) -> list[set[str]]:
        """Return of each group which values the script makes otherwise than it did."""
        edited: list[set[str]] = [set() for _ in self._inner.param_groups]
        now = self._update.hyperparameters[1:]
        for keys, new, old in zip(
            edited, now, record.get("hyperparameters", now)[1:], strict=False
        ):
            changed = {key for key in new if new[key] != old.get(key)}
            keys |= changed | {f"initial_{key}" for key in changed}
        return edited

    def _is_edited(self, record: Mapping[str, Any]) -> bool:
        """Return whether the script makes the optimizer or the schedule otherwise than it did."""
        return (
            record.get("hyperparameters") != self._update.hyperparameters
            or record.get("schedule") != type(self._update.scheduler).__name__
        )

    # --- attributes -------------------------------------------------------------------------------

    def _attributes(self) -> dict[str, Any]:
        """Return what an optimizer has beside what all have."""
        if self._optimizer.flat:
            return {}
        return {n: v for n, v in vars(self._inner).items() if n not in standard_attributes()}

    def _mark(self, value: Any) -> str | None:
        """Return what changes if a value does; None for what cannot be looked into."""
        encoder = Encoder(self._optimizer.names)
        try:
            state = value.state_dict() if isinstance(value, Optimizer) else value
            tree = json.dumps(encoder.encode(state, "value"), sort_keys=True)
        except CheckpointError:
            return None
        total = hashlib.sha256(tree.encode())
        for tensor in encoder.tensors.values():
            total.update(content(tensor).data)
        return total.hexdigest()


def _changes(value: Any) -> object:
    """Return what tells whether an object of a class of its own has changed: who it is, and has."""
    simple = (bool, int, float, str)
    inside = vars(value) if hasattr(value, "__dict__") and not callable(value) else {}
    return (
        id(value),
        repr(value)[:10_000],
        [(n, v if isinstance(v, simple) else id(v)) for n, v in inside.items()],
    )


def _values(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of what a group has beside parameters."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _put(group: dict[str, Any], key: str, value: Any) -> None:
    own: Any = group.get(key)
    are_tensors = isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor)
    group[key] = value.to(own.device) if are_tensors else value


def _same(left: Any, right: Any) -> bool:
    are_tensors = isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
    return torch.equal(left, right) if are_tensors else bool(left == right)


def _load_into(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Have an optimizer load a state dict, and keep the dtypes and strides that it had.

    torch brings what is floating-point to the parameter's dtype, and makes a string of a string's
    generator.
    """
    saved = {number: dict(entries) for number, entries in _by_number(state).items()}
    optimizer.load_state_dict(state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, entries in saved.items():
        loaded = optimizer.state.get(parameters[number]) if number < len(parameters) else None
        if not isinstance(loaded, dict):
            continue
        for entry, value in entries.items():
            if entry in loaded:
                loaded[entry] = _as_saved(value, loaded[entry])


def _require_state_dict(state: Any, optimizer: Optimizer) -> None:
    """Check what an optimizer is about to load: a forged one would raise anything."""
    groups = state.get("param_groups") if isinstance(state, dict) else None
    own = [len(group["params"]) for group in optimizer.param_groups]
    if (
        not isinstance(groups, list)
        or not isinstance(state.get("state"), dict)
        or not all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups)
        or [len(group["params"]) for group in groups] != own
    ):
        raise CheckpointError(f"no state dict of {type(optimizer).__name__}: {state!r:.80}")


def _by_number(state: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    entries = state.get("state")
    if not isinstance(entries, dict):
        return {}
    return {k: v for k, v in entries.items() if isinstance(k, int) and isinstance(v, dict)}


def _as_saved(saved: Any, loaded: Any) -> Any:
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        same = (saved.dtype, saved.stride()) == (loaded.dtype, loaded.stride())
        return loaded if same or saved.shape != loaded.shape else saved.to(loaded.device)
    if type(saved) in (list, tuple) and isinstance(loaded, (list, tuple)):
        return type(saved)(_as_saved(s, v) for s, v in zip(saved, loaded, strict=True))
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return {key: _as_saved(saved[key], loaded.get(key)) for key in saved}
    return saved if isinstance(saved, str) else loaded
