"""A torch optimizer over flat vectors, if the optimizer works element by element.

An element-wise optimizer treats an element alike in any tensor. So the user's own optimizer object
receives, instead of a group's parameters, the stretches of the flat vectors that hold them, and one
fused kernel updates all of them. Other optimizers (Muon, Adafactor, ...) keep the ordinary
parameters.

A parameter without a gradient is left alone, as torch leaves alone a parameter whose ``grad`` is
None. A stretch with such parameters and with others is cut between them, once: from then on each
piece has its own count of steps. Cutting changes no bits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import groupby
from typing import Any

import torch
from torch.optim import Optimizer

from quorate.errors import SettingError, UserError
from quorate.replica.flat import Flat
from quorate.replica.model import trainable
from quorate.replica.sparse.found import GradKinds
from quorate.training.optimizing.closure import Closure, takes_closure
from quorate.training.optimizing.cores import cores_for
from quorate.training.optimizing.entries import Entries
from quorate.training.optimizing.homes import FormerMemory, ParameterHome, at_home, bring_home, left
from quorate.training.optimizing.known_optimizers import (
    COUNTERS,
    FUSED,
    OptimizerStates,
    fill_momenta,
    is_by_element,
    is_elementwise,
    kept_by_rows,
    kind_of_state,
    leaves_it_open,
    piece_of_state,
    require_state_of,
)
from quorate.training.optimizing.steps import bare_step, step_flat

OptimizerFactory = (
    Callable[[list[torch.nn.Parameter]], Optimizer]
    | Callable[[list[tuple[str, torch.nn.Parameter]]], Optimizer]
)


def takes_names(factory: OptimizerFactory) -> bool:
    """Return whether an optimizer function receives pairs of a name and a parameter.

    The function does if its first parameter is called ``named_parameters``.
    """
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a callable without a signature, not written in Python
        return False
    return next(iter(parameters), None) == "named_parameters"


class FlatOptimizer:
    """The user's optimizer over the coordinator's flat parameters.

    Args:
        factory: the user's function from a list of parameters to an optimizer; see ``takes_names``.
        model: the model whose trainable parameters are views of ``parameters``.
        names: names of the optimizer's parameters. Default: all.
        prefix: prefix of the names of the optimizer's tensors in checkpoints; no other optimizer
            has the prefix.

    Attributes:
        user_optimizer: the optimizer that the function returned.
        uses_vectors: whether ``user_optimizer`` has stretches of the flat vectors in its groups; if
            not, it has the model's parameters.
        parameters: the optimizer's parameters as the user's model has them, by name.
        names: the names of these parameters, by id.
        own_names: the names alone.
        groups: the names in each parameter group, as when training began.
        elements: P, the number of elements of these parameters.
        flat_parameters: the flat vectors, with parameters of other optimizers too.
        is_spread: whether each owner has a slice of the state.

    Raises:
        SettingError: the factory does not return an optimizer, or the optimizer cannot work.
    """

    is_spread = False

    def __init__(
        self,
        factory: OptimizerFactory,
        model: torch.nn.Module,
        parameters: Flat,
        names: Collection[str] | None = None,
        prefix: str = "",
    ) -> None:
        self.prefix = prefix
        # 1. The user's optimizer, over the model's parameters.
        named = {n: p for n, p in trainable(model).items() if names is None or n in names}
        given: Any = [*named.items()] if takes_names(factory) else [*named.values()]
        self.user_optimizer = factory(given)
        if not isinstance(self.user_optimizer, Optimizer):
            raise SettingError(
                "optimizer",
                type(self.user_optimizer).__name__,
                "a function from parameters to a torch.optim.Optimizer",
                "for example lambda params: torch.optim.SGD(params, lr=0.1)",
            )
        self.names = {id(p): name for name, p in named.items()}
        self._is_of_some = names is not None
        self.parameters = named
        self.groups = [[self._name(p) for p in g["params"]] for g in self.param_groups]
        # The groups as the user's function made them, before any is fused.
        self._fresh = [dict(group) for group in self.param_groups]
        self.flat_parameters = parameters
        layout, ours = parameters.layout, () if names is None else named
        # P, over all dtypes: the number of elements of this optimizer's parameters.
        self.elements = sum(layout.sections[name].span for name in ours) or sum(layout.sizes)
        # torch's optimizers take a gradient by rows for a parameter, not for a stretch of several.
        self.uses_vectors = is_elementwise(self.user_optimizer) and named.keys().isdisjoint(
            layout.by_rows
        )
        # 2. Parameters whose memory was replaced by the optimizer return to the flat vectors.
        self._homes = [ParameterHome(name, p, parameters.views[name]) for name, p in named.items()]
        self._memories: list[FormerMemory] = []  # where the optimizer moved parameters last
        self.bring_home()
        self.own_names = frozenset(named)
        self._same_groups: list[list[int]] = []  # ids of the tensors in groups already checked
        # 3. Stretches of the flat vectors take the place of the parameters in the groups.
        # Per optimizer tensor: the names of its parameters, in order.
        self._names_of: dict[torch.Tensor, list[str]] = {}
        for group in self.param_groups:
            of_group = [self._name(p) for p in group["params"]]
            if self.uses_vectors:
                group["params"] = []
                for stretch, members in parameters.runs(of_group):
                    tensor = torch.nn.Parameter(stretch)
                    group["params"].append(tensor)
                    self._names_of[tensor] = members
                kind = type(self.user_optimizer)
                if kind in FUSED and leaves_it_open(kind, group):
                    group["fused"] = True
            else:
                self._names_of.update(
                    (p, [name]) for p, name in zip(group["params"], of_group, strict=True)
                )

        if self.uses_vectors:
            self.user_optimizer.state = OptimizerStates(self._state_of)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups, with the values that user code sets, such as a learning rate."""
        groups: list[dict[str, Any]] = self.user_optimizer.param_groups
        return groups

    @property
    def has_modes(self) -> bool:
        """True if the optimizer has different parameters for training and for evaluation.

        Schedule-free optimizers do: gradients are computed at y, and evaluation uses x.
        """
        if self.uses_vectors:
            return False
        return all(callable(getattr(self.user_optimizer, name, None)) for name in ("train", "eval"))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch to the parameters for evaluation in the block; restore them bitwise after it."""
        if not self.has_modes:
            yield
            return
        before = self.flat_parameters.copied()
        groups = [dict(group) for group in self.param_groups]
        self.user_optimizer.eval()  # type: ignore[attr-defined]
        self.bring_home()
        try:
            yield
        finally:
            # The optimizer's train() would restore them up to rounding only.
            self.flat_parameters.copy_(before)
            for group, values in zip(self.param_groups, groups, strict=True):
                group.update(values)

    def kept_by_rows(self, found: GradKinds) -> frozenset[str]:
        """Return the parameters whose gradients are passed by rows; see ``kept_by_rows``."""
        return kept_by_rows(self.user_optimizer, zip(self._fresh, self.groups, strict=True), found)

    @property
    def takes_closure(self) -> bool:
        """True if ``step`` accepts a closure, and no other optimizer has other parameters."""
        return not self._is_of_some and takes_closure(self.user_optimizer)

    @property
    def lr(self) -> float:
        """The learning rate of the first group."""
        return float(self.param_groups[0]["lr"])

    @property
    def cores(self) -> int:
        """The number of cores for operations on the vectors of all parameters."""
        return cores_for(self.elements)

    def step(
        self, gradient: Flat, missing: Collection[str] = (), closure: Closure | None = None
    ) -> None:
        """Update the parameters in place from a gradient of their layout.

        Args:
            missing: parameters without a gradient: no decay, no momentum, and no step is counted.
            closure: for an optimizer that evaluates the gradient at other parameters too.

        Raises:
            UserError: user code has added a group since, or moved parameters between groups.
        """
        self.require_same_groups()
        self.set_gradients(gradient, missing)
        if type(self.user_optimizer) is torch.optim.SGD:
            fill_momenta(self.user_optimizer)
        if self.has_modes:
            self.user_optimizer.train()  # type: ignore[attr-defined]
        if closure is not None:
            self.user_optimizer.step(closure)  # type: ignore[arg-type]
        elif not self.uses_vectors:
            (bare_step(self.user_optimizer) or self.user_optimizer.step)()
        elif step_flat(self.user_optimizer, self.elements):
            return  # torch's own step has no access to the user's parameters
        self.bring_home()

    def bring_home(self) -> None:
        """Copy values from memory chosen by the optimizer to the flat parameters.

        Raises:
            UserError: the optimizer still writes to that memory, as if the parameter were there.
        """
        for memory in self._memories:
            if memory.is_written:
                raise UserError(
                    "optimizer",
                    f"{type(self.user_optimizer).__name__} moved parameter {memory.name!r} to "
                    "other memory (p.data = ...) and writes there in a later step, but workers "
                    "read the first memory",
                    fix="write into the parameter: p.data.copy_(values)",
                )
        away = left(self._homes)
        self._memories = [FormerMemory(home.name, home.parameter.detach()) for home in away]
        bring_home(away)

    def close(self) -> None:
        """Do nothing: no other process makes updates for this optimizer."""

    def at_home(self) -> AbstractContextManager[None]:
        """Return a context in which the flat parameters have the values of the user's parameters.

        See ``at_home`` in ``homes.py``.
        """
        return at_home(self._homes)

    def require_same_groups(self) -> None:
        """Check that user code has neither added groups nor moved parameters between groups.

        Raises:
            UserError: user code has changed the groups.
        """
        groups = self.param_groups
        ids = [[*map(id, group["params"])] for group in groups]
        if ids == self._same_groups:  # ``_names_of`` keeps tensors alive, so ids are not reused
            return
        if len(groups) != len(self.groups):
            raise UserError(
                "optimizer",
                got=f"{len(groups)} groups",
                expected=f"{len(self.groups)} as when training began",
                fix="make all groups where the optimizer is made, and switch parameters off "
                "with requires_grad_(False) until their turn",
            )
        for number, (group, names) in enumerate(zip(groups, self.groups, strict=True)):
            held = (self._names_of.get(tensor, ["?"]) for tensor in group["params"])
            # Tensors of a vector are ordered by dtype, so the order within the group may differ.
            if {name for some in held for name in some} != set(names):
                raise UserError(
                    "optimizer",
                    f"group {number} has other parameters than when training began",
                    fix="leave the parameters in their groups, and change values such as "
                    "group['lr']",
                )
        self._same_groups = ids

    def set_gradients(self, gradient: Flat, missing: Collection[str]) -> None:
        """Set the gradients of the parameters, as ``step`` does first."""
        if missing:
            self._cut_where(lambda name: name in missing)
        for tensor, names in self._names_of.items():
            if names[0] in missing:
                tensor.grad = None
            elif (rows := gradient.rows.get(names[0])) is not None:
                tensor.grad = rows.like(tensor)
            elif self.uses_vectors:
                first = gradient.layout.sections[names[0]]
                vector, end = gradient.vectors[first.vector], first.start + tensor.numel()
                is_all = end - first.start == vector.numel()
                tensor.grad = vector if is_all else vector[first.start : end]
            else:
                tensor.grad = gradient.views[names[0]]

    def state(self) -> dict[str, dict[str, Any]]:
        """Return per parameter name the entries that torch's own state_dict would hold.

        Tensors are views of the optimizer's tensors in the parameter's shape, or scalars.
        """
        state: dict[str, dict[str, Any]] = {}
        for tensor, names in self._names_of.items():
            # Fetches nothing: see ``LentStates``.
            values = dict.get(self.user_optimizer.state, tensor, {})
            for name in names:
                state[name] = {k: self._cut(k, v, names, name) for k, v in values.items()}
        return state

    def _state_of(self, parameter: object) -> dict[str, Any] | None:
        """Return the state of a parameter of the user; None for anything else."""
        name = self.names.get(id(parameter))
        for tensor, names in self._names_of.items() if name is not None else ():
            if name in names:
                values = dict.get(self.user_optimizer.state, tensor, {})
                return {k: self._cut(k, v, names, name) for k, v in values.items()}
        return None

    def loadable(self, state: dict[str, dict[str, Any]]) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the argument of ``load``, made from the result of ``state``. Nothing is changed.

        Parameters updated together may have different kinds of state: some of them had no gradient
        in a step, or were frozen. Such parameters are cut apart; cutting changes no bit.

        Raises:
            CheckpointError: an entry is missing, or has another shape or dtype than this
                optimizer's entry.
        """
        loadable, sections = {}, self.flat_parameters.layout.sections
        if self.uses_vectors:
            for group in self.param_groups:
                for tensor in group["params"]:
                    of = {name: (state[name], sections[name]) for name in self._names_of[tensor]}
                    require_state_of(type(self.user_optimizer), of, tensor, group)
        self._cut_where(lambda name: kind_of_state(state[name]))
        for group in self.param_groups:
            for tensor in group["params"]:
                names = self._names_of[tensor]
                first = state[names[0]]
                values = {entry: self._whole(entry, state, tensor, names, group) for entry in first}
                if values:
                    loadable[tensor] = values
        return loadable

    def load(self, loadable: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Replace the state by the result of ``loadable``."""
        for tensor in self._names_of:
            dict.pop(self.user_optimizer.state, tensor, None)
        dict.update(self.user_optimizer.state, loadable)

    def put(self, entries: Entries) -> None:
        """Replace the state by copies of entries; instead of entries on "meta", put zeros."""
        loadable = self.loadable(entries)
        for tensor, own in loadable.items():
            for entry, value in own.items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    own[entry] = torch.zeros(value.shape, dtype=value.dtype, device=tensor.device)
        # Not a subclass's ``load``, which would forget a file with entries not read yet.
        FlatOptimizer.load(self, loadable)

    def _cut_where(self, kind: Callable[[str], object]) -> None:
        """Cut the stretches, with their state, where parameters of a different kind begin."""
        self._same_groups = []
        for group in self.param_groups:
            pieces: list[torch.Tensor] = []
            for tensor in group["params"]:
                runs = [list(names) for _, names in groupby(self._names_of[tensor], kind)]
                pieces += [tensor] if len(runs) == 1 else self._pieces(tensor, runs)
            group["params"][:] = pieces
        self._names_of = {t: self._names_of[t] for g in self.param_groups for t in g["params"]}

    def _pieces(self, tensor: torch.Tensor, runs: Sequence[list[str]]) -> list[torch.Tensor]:
        """Cut a stretch, with its state, into a tensor for each run of parameter names."""
        sections = self.flat_parameters.layout.sections
        state = dict.pop(self.user_optimizer.state, tensor, {})
        sizes = [sum(sections[name].span for name in names) for names in runs]
        pieces: list[torch.Tensor] = []
        start = 0
        for names, size in zip(runs, sizes, strict=True):
            piece = torch.nn.Parameter(tensor.detach()[start : start + size])
            self._names_of[piece] = names
            if state:
                own = {entry: piece_of_state(entry, v, start, size) for entry, v in state.items()}
                dict.__setitem__(self.user_optimizer.state, piece, own)
            pieces.append(piece)
            start += size
        return pieces

    def _whole(
        self,
        entry: str,
        state: dict[str, dict[str, Any]],
        tensor: torch.Tensor,
        names: list[str],
        group: dict[str, Any],
    ) -> Any:
        """Return a state entry of an optimizer tensor, assembled from its parameters' entries."""
        example = state[names[0]][entry]
        if not isinstance(example, torch.Tensor):
            return example
        if entry in COUNTERS:
            # As in torch, counters stay on the host, unless a kernel reads them.
            on_device = entry != "step" or group.get("fused") or group.get("capturable")
            return example.to(tensor.device if on_device else "cpu", copy=True)
        if example.is_meta:  # each rank reads its part
            return torch.empty(tensor.shape, dtype=example.dtype, device="meta")
        if not self.uses_vectors:
            fits = example.shape == tensor.shape
            target = torch.empty_like(tensor) if fits else torch.empty_like(example)
            return target.to(dtype=example.dtype, device=tensor.device).copy_(example)
        whole = torch.zeros_like(tensor)
        for name in names:
            self._cut(entry, whole, names, name).copy_(state[name][entry])
        return whole

    def _cut(self, entry: str, value: Any, names: list[str], name: str) -> Any:
        """Return the part of a state entry for one of the parameters in a stretch, as a view."""
        if not self.uses_vectors or not is_by_element(entry, value):
            return value
        sections = self.flat_parameters.layout.sections
        section = sections[name]
        offset = section.start - sections[names[0]].start
        return value.as_strided(section.shape, section.stride, value.storage_offset() + offset)

    def _name(self, parameter: torch.Tensor) -> str:
        """Return the name of a parameter; raise UserError if the model does not train it."""
        name = self.names.get(id(parameter))
        if name is None:
            raise UserError(
                "optimizer",
                "a parameter in its groups is not a trainable parameter of the model",
                fix="use the parameters that the function receives",
            )
        return name
