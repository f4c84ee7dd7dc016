"""Model edits: changes to the model by callbacks and loop bodies, found and sent to all workers.

Between two updates user code may change the model as in a loop of plain torch: ``p.data = ...``,
``copy_``, ``load_state_dict``, ``requires_grad_``, ``model.beta = 0.3``. Before shards are dealt,
``ModelEdits.detect`` finds the changes, in one pass over tensors and attributes:

    values of a trained parameter    are in the flat vector read by workers; if the parameter has
                                     new memory, the values are copied to the vector
    values of a frozen parameter,    recorded in ``ModelChanges``: workers receive the changes with
    ``requires_grad``, an attribute  the next shard, checkpoints save them as "amendments"
    buffers                          travel with every shard
    new modules or parameters        are refused; hooks are reported
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from quorate.engines.job import OriginalModel
from quorate.engines.model_changes import ModelChanges, Simple, plain
from quorate.errors import CheckpointError, UserError
from quorate.replica.beside.values import NewestValues
from quorate.replica.digest import flat_bytes
from quorate.replica.flat import Flat
from quorate.replica.notes import Notes
from quorate.replica.torch_internals import version
from quorate.replica.turns import disturbances, drawn_outside
from quorate.replica.witness.attributes import AttributeObjects
from quorate.replica.witness.guard import bit_sum
from quorate.replica.witness.structure import ModuleTables, built
from quorate.training.optimizing.homes import ParameterHome, bring_home, left

# Attributes of every module: hooks, tables, and the mode, which replicas set themselves.
_MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module()))
_SIMPLE = (bool, int, float, str, type(None))
_MISSING = object()
# Of ``checksum``: int32 words in a weighted sum, and bytes summed at once. More bytes at once take
# more memory for intermediate results on a GPU.
_ROW_WORDS = 1024
_STRETCH_BYTES = 16 << 20
# Values that change when a parameter has new memory, or another form.
_MEMORY_READERS: tuple[Callable[[torch.Tensor], object], ...] = (
    *(torch.Tensor.data_ptr, torch.Tensor.stride),
    *map(attrgetter, ("shape", "dtype", "device")),
)


class _TrainedParameter(NamedTuple):
    """A trained parameter with a home, a place in the flat vector, and a place in a module."""

    home: ParameterHome
    owner: Mapping[str, object]  # the owning module's table of parameters
    attribute: str


class ModelEdits:
    """Finds and records changes made to the model by user code between updates.

    Args:
        model: the coordinator's model; its trained parameters are views of ``parameters``.
        mutable_frozen: see ``Buffers``; these are sent with every shard.
        notes: messages for the user, on changes that cannot be sent.

    Attributes:
        model_changes: all recorded changes since the script made the model, as workers receive
            them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Flat,
        mutable_frozen: Collection[int],
        notes: Notes,
    ) -> None:
        self.model_changes = ModelChanges()
        self._shared_values = NewestValues()
        self._model = model
        self._notes = notes
        self._refusal: UserError | None = None
        self._modules = list(model.named_modules())
        self._trained: list[_TrainedParameter] = []
        self._frozen: list[ParameterHome] = []
        numbers = {id(p): number for number, p in enumerate(model.parameters())}
        seen: set[int] = set()
        for prefix, module in self._modules:
            # A scripted module has no such table, or a substitute.
            table = vars(module).get("_parameters")
            owner = table if isinstance(table, Mapping) else {}
            for attribute, parameter in module.named_parameters(recurse=False):
                if id(parameter) in seen:
                    continue  # a tied parameter is known by its first name
                seen.add(id(parameter))
                name = f"{prefix}.{attribute}" if prefix else attribute
                if (view := parameters.views.get(name)) is not None:
                    self._trained.append(
                        _TrainedParameter(ParameterHome(name, parameter, view), owner, attribute)
                    )
                elif numbers[id(parameter)] not in mutable_frozen:
                    self._frozen.append(ParameterHome(name, parameter, parameter.data))
        self._parameters = [home.parameter for home in self._homes()]
        # The result of ``_parameter_memory`` while all parameters are at home; None: not known.
        self._memory_at_home: tuple[list[object], ...] | None = None
        # Simple attributes by module: as the script made them, for ``revert``; and at the last call
        # of ``detect``. Then the other attributes (tensors, lists, ...) at that call.
        self._script_attributes = {
            prefix: _attributes_of(module)[0] for prefix, module in self._modules
        }
        self._known_attributes: dict[str, dict[str, Any]] = {}
        self._known_objects: dict[str, dict[str, Any]] = {}
        self._attribute_watch = AttributeObjects(
            [module for _, module in self._modules], but=_MODULE_ATTRIBUTES
        )
        self.set_baseline()
        self._drawn = drawn_outside()
        self._disturbances = disturbances()
        # Values that other processes have copies of (ranks, servers): checksums taken before user
        # code runs show whether user code changed the values.
        self._may_user_code_have_run = True  # since the last update
        self._is_announced = False  # whether ``before_user_code`` is called ahead of user code
        self._fetch_values: Callable[[], None] = lambda: None
        self._watched_values: Callable[[], list[torch.Tensor]] | None = None
        self._checksum: list[bytes] = []  # by watched tensor

    # --- between two updates ----------------------------------------------------------------------

    def detect(self) -> None:
        """Find the changes since the last call, and record them for all workers."""
        moved = self._copy_moved_values()
        switched_off = self._switched_off_names()
        frozen = self._has_frozen_changed(moved)
        attributes = self._changed_attributes()
        self._check_structure()
        known = self.model_changes
        if switched_off != known.switched_off or frozen or attributes:
            merged = {name: dict(them) for name, them in known.attributes.items()}
            for name, them in attributes.items():
                merged.setdefault(name, {}).update(them)
            self.model_changes = replace(
                known,
                number=known.number + 1,
                switched_off=switched_off,
                attributes=merged,
                frozen=known.frozen + frozen,
            )
        if (shared := self._shared_values.look()) is not self.model_changes.shared:
            self.model_changes = replace(self.model_changes, shared=shared)

    def raise_if_unsupported(self) -> None:
        """Raise the error for a change that cannot be sent to workers, if there is such a change.

        Raises:
            UserError: there is such a change. The state is as before the change, and can be saved.
        """
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            raise refusal

    def detect_draws(self, *, first: bool = False) -> None:
        """Report numbers drawn outside of shards since the last call as a doubt: they have no key.

        Args:
            first: whether this is the first call.
        """
        before, self._drawn = self._drawn, drawn_outside()
        # The first shard that draws moves the generators before the draw is detected.
        by_shards, self._disturbances = self._disturbances, disturbances()
        is_of_a_shard = by_shards != self._disturbances
        if self._drawn != before and not (first or is_of_a_shard):
            self._notes.doubt(
                "the optimizer, a callback or the loop body draws from Python's random or NumPy: "
                "after a resume the numbers differ; draw from torch, which quorate seeds for each "
                "update, or from a generator made for each step"
            )

    # --- the model as workers know it -------------------------------------------------------------

    def set_baseline(self) -> None:
        """Accept the present model: frozen parameters may have moved, for workers to map them.

        Attributes left behind by quorate's forward passes are no changes of the user.
        """
        self._frozen = [home._replace(tensor=home.parameter.data) for home in self._frozen]
        self._memory_at_home = None
        self._versions = {home.name: version(home.parameter) for home in self._frozen}
        self._attribute_watch.forget()  # also deleted attributes
        self.ignore_attributes()
        self._built = [built(module) for _, module in self._modules]
        self._tables = ModuleTables(self._modules)
        self._outline = self._tables.outline()

    def ignore_attributes(self) -> None:
        """Accept the present attributes: they were set by shards computed with the model itself."""
        for number in self._attribute_watch.changed():
            prefix, module = self._modules[number]
            self._known_attributes[prefix], self._known_objects[prefix] = _attributes_of(module)

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters in the flat vectors, including those that are switched off."""
        return {place.home.name: place.home.parameter for place in self._trained}

    def frozen(self) -> Mapping[str, torch.Tensor]:
        """Return the values of the parameters that are not trained."""
        return {home.name: home.tensor for home in self._frozen}

    @property
    def original(self) -> OriginalModel:
        """Return the model in the form that towers follow."""
        return OriginalModel(lambda: self.model_changes, self.frozen, self.change_number)

    def change_number(self) -> int:
        """Return a new number after each change outside of trained parameters and buffers.

        Makes one pass over the frozen parameters: a write through ``.data`` leaves no other trace.
        """
        sums = [int(bit_sum(home.tensor)) for home in self._frozen]
        return hash((self.model_changes.number, self.model_changes.shared.number, *sums))

    # --- values of tensors ------------------------------------------------------------------------

    @contextmanager
    def user_code_announced(self) -> Iterator[None]:
        """Promise, inside the block, a call of ``before_user_code`` ahead of all user code.

        Without the promise, user code may run at any time, as in a user's own loop over updates.
        """
        self._is_announced = True
        try:
            yield
        finally:
            self._is_announced = False

    def before_user_code(self) -> None:
        """Fetch values held by other processes, and take checksums of watched values.

        Called when user code is about to run; only the first call after an update has an effect.
        """
        if not self._may_user_code_have_run:
            self._may_user_code_have_run = True
            self._fetch_values()
            self._note_values()

    def watch_values(self, values: Callable[[], list[torch.Tensor]]) -> None:
        """Watch the values of tensors from now on: other processes have copies of the values."""
        self._watched_values = values
        self._note_values()

    def _note_values(self) -> None:
        if self._watched_values is not None:
            self._checksum = [checksum(value) for value in self._watched_values()]

    def updated(self, fetch: Callable[[], None] = lambda: None) -> None:
        """Note an update: user code has not run since.

        Args:
            fetch: fetches values from other processes; called before the first user code.
        """
        self._fetch_values, self._may_user_code_have_run = fetch, False
        if not self._is_announced:
            self.before_user_code()

    def have_values_changed(self) -> bool:
        """Return whether user code changed watched values since the last update."""
        if not self._may_user_code_have_run or self._watched_values is None:
            return False
        return [checksum(value) for value in self._watched_values()] != self._checksum

    # --- changes in checkpoints -------------------------------------------------------------------

    def require_fitting(self, saved: Mapping[str, Any]) -> None:
        """Compare the changes saved in a checkpoint with the model. Nothing is changed.

        Raises:
            CheckpointError: the changes are of another model, or set attributes that no user code
                sets.
        """
        modules = dict(self._modules)
        if odd := sorted(set(saved["switched_off"]) - self.trained().keys()):
            raise CheckpointError("amendments", f"{odd[0]!r:.80} is no trained parameter")
        for name, attributes in saved["attributes"].items():
            if name not in modules:
                raise CheckpointError("amendments", f"there is no module {name!r:.80}")
            for attribute in attributes:
                there = getattr(modules[name], attribute, None)
                if (
                    not attribute.isidentifier()
                    or attribute in _MODULE_ATTRIBUTES
                    or not (isinstance(there, _SIMPLE) or attribute in vars(modules[name]))
                ):
                    raise CheckpointError("amendments", f"{attribute!r:.80} is no plain attribute")

    def load(self, saved: Mapping[str, Any]) -> None:
        """Apply the changes saved in a checkpoint to the model."""
        found, known = ModelChanges.from_json(saved), self.model_changes
        number, frozen = known.number + 1, known.frozen + 1
        self.model_changes = replace(found, number=number, frozen=frozen, shared=known.shared)
        self.model_changes.apply(self._model, self.trained())
        for prefix, attributes in found.attributes.items():
            self._known_attributes[prefix].update(attributes)  # no new change

    def revert(self) -> None:
        """Restore the attributes and switches that the script gave the model."""
        ModelChanges().apply(self._model, self.trained())
        modules = dict(self._modules)
        for prefix, attributes in self.model_changes.attributes.items():
            for attribute in attributes:
                before = self._script_attributes[prefix].get(attribute, _MISSING)
                if before is _MISSING:
                    delattr(modules[prefix], attribute)
                else:
                    setattr(modules[prefix], attribute, before)
        self.model_changes = ModelChanges(shared=self.model_changes.shared)

    # --- parts of ``detect`` ----------------------------------------------------------------------

    def _switched_off_names(self) -> frozenset[str]:
        """Return the names of trained parameters that are switched off."""
        off = []
        for (name, parameter, _), owner, attribute in self._trained:
            if not parameter.requires_grad:
                off.append(name)
            if owner.get(attribute, parameter) is not parameter:
                self._refuse(
                    f"parameter {name!r}",
                    got="another parameter in its place, which no optimizer has",
                    expected="the parameter that training began with",
                    fix="write into that parameter: p.data.copy_(values), or load_state_dict "
                    "without assign",
                )
        return frozenset(off)

    def _has_frozen_changed(self, moved: Collection[str]) -> bool:
        """Return whether a frozen parameter changed.

        Args:
            moved: names of parameters in new memory.
        """
        changed = False
        for name, parameter, _ in self._frozen:
            now = version(parameter)
            if name in moved or now != self._versions[name]:
                changed = True
            self._versions[name] = now
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                self._refuse(
                    f"parameter {name!r}",
                    got="requires_grad=True",
                    expected="requires_grad=False as when training began, because no optimizer "
                    "has this parameter",
                    fix="make the trainer with requires_grad=True, and set it to False in a "
                    "callback's started() until the parameter is to be trained",
                )
        return changed

    def _changed_attributes(self) -> dict[str, dict[str, Simple]]:
        """Return the changed simple attributes by module; note values that cannot be sent."""
        changed: dict[str, dict[str, Simple]] = {}
        for number in self._attribute_watch.changed():
            prefix, module = self._modules[number]
            known, others = self._known_attributes[prefix], self._known_objects[prefix]
            for name, value in vars(module).items():
                if name in _MODULE_ATTRIBUTES:
                    continue
                if isinstance(value, _SIMPLE):
                    before = known.get(name, _MISSING)
                    if value is before or (value == before and type(value) is type(before)):
                        continue
                    if value != value and before != before:  # both are NaN
                        continue
                    known[name] = value
                    sent = self.model_changes.attributes.get(prefix, {})
                    now = plain(value)
                    if name not in sent or sent[name] != now:
                        changed.setdefault(prefix, {})[name] = now
                elif others.get(name) is not value:
                    others[name] = value
                    self._notes.add(
                        f"{type(module).__name__}.{name} of {prefix or 'the model'!r} was set to a "
                        f"new {type(value).__name__} between two updates: no worker and no "
                        "checkpoint gets the value; use a number, a string or a buffer"
                    )
        return changed

    def _check_structure(self) -> None:
        """Refuse exchanged modules, and report hooks as a doubt: workers' models have neither."""
        before, self._outline = self._outline, self._tables.outline()
        if before == self._outline:
            return
        for number, (prefix, module) in enumerate(self._modules):
            known, now = self._built[number], built(module)
            if now == known:
                continue
            self._built[number] = now
            where = f"module {prefix!r}" if prefix else "the model"
            if [*map(id, now[0])] != [*map(id, known[0])]:
                self._refuse(
                    where,
                    got="another module inside, which no worker has",
                    expected="the modules that training began with",
                    fix="set attributes of the module that was there, or make a new Trainer",
                )
            else:
                self._notes.doubt(
                    f"a hook of {where} was registered or removed between two updates: workers "
                    "compute without the change; register the hook before training, and switch it "
                    "on and off by an attribute of the module"
                )

    def _parameter_memory(self) -> tuple[list[object], ...]:
        """Return values that change with a parameter's memory, strides, shape, dtype or device."""
        return tuple([[*map(read, self._parameters)] for read in _MEMORY_READERS])

    def _homes(self) -> list[ParameterHome]:
        return [*(place.home for place in self._trained), *self._frozen]

    def _copy_moved_values(self) -> set[str]:
        """Copy moved values to the memory that workers read; return the names."""
        where = self._parameter_memory()
        if where == self._memory_at_home:
            return set()
        self._memory_at_home = None
        homes = [home for home in self._homes() if home.is_left]
        for home in homes:
            value = home.parameter.data
            if not home.fits:
                self._refuse(
                    f"parameter {home.name!r}",
                    got=f"shape {tuple(value.shape)}",
                    expected=f"{tuple(home.tensor.shape)} as when training began",
                    fix="make a new Trainer for another shape",
                )
            elif value.dtype != home.tensor.dtype:
                self._notes.add(
                    f"parameter {home.name!r} received values of {value.dtype} and stays "
                    f"{home.tensor.dtype}, as when training began"
                )
        bring_home(left(homes))
        for home in homes:  # parameters of another shape are restored
            home.parameter.data = home.tensor
        if not homes:
            self._memory_at_home = where
        return {home.name for home in homes}

    def _refuse(self, name: str, *, got: str, expected: str, fix: str) -> None:
        if self._refusal is None:
            self._refusal = UserError(name, got=got, expected=expected, fix=fix)


def checksum(values: torch.Tensor) -> bytes:
    """Return a weighted sum for each row of memory; each word of a row has its own weight."""
    plain = flat_bytes(values.detach())
    if plain.data_ptr() % 4:
        plain = plain.clone()
    rest = torch.zeros(4 * _ROW_WORDS, dtype=torch.uint8, device=plain.device)
    cut = plain.numel() - plain.numel() % len(rest)
    rest[: plain.numel() - cut] = plain[cut:]
    weights = _odd_weights(plain.device)
    found = []
    for stretch in (*torch.split(plain[:cut], _STRETCH_BYTES), rest):
        rows = stretch.view(torch.int32).view(-1, _ROW_WORDS)
        # The sum wraps around. GPUs cannot multiply an integer matrix by an integer vector.
        of_cpu = plain.device.type == "cpu"
        found.append(rows @ weights if of_cpu else (rows * weights).sum(1, dtype=torch.int32))
    return torch.cat(found).cpu().numpy().tobytes()


@cache
def _odd_weights(device: torch.device) -> torch.Tensor:
    """Return odd weights: with an odd weight, any change of a single word changes the sum."""
    numbers = torch.arange(_ROW_WORDS, dtype=torch.int64) * 0x9E3779B1 * 2 + 1
    return (numbers & 0x7FFFFFFF).to(device, torch.int32)


def _attributes_of(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the simple attributes of a module, and its other ones."""
    own = {name: value for name, value in vars(module).items() if name not in _MODULE_ATTRIBUTES}
    simple = {name: value for name, value in own.items() if isinstance(value, _SIMPLE)}
    return simple, {name: value for name, value in own.items() if name not in simple}
