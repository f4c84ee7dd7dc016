"""Facts about torch's own optimizers: kernels, state entries, and gradients by rows."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Any

import torch
from torch.optim import Optimizer

from quorate.errors import CheckpointError, SettingError
from quorate.replica.flat import Section
from quorate.replica.sparse.found import GradKinds
from quorate.replica.torch_internals import has_step_hooks
from quorate.training.optimizing.closure import needs_closure

# Exact types: a subclass may look at shapes.
ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    (
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    )
)
FUSED: frozenset[type[Optimizer]] = frozenset(
    (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
)
# State entries of torch's optimizers that exist once per tensor and not per element. The name has
# to tell: the moments of a parameter without dimensions are scalars too.
COUNTERS = frozenset(("step", "eta", "mu", "mu_product"))
_PLAIN = (bool, int, float, str, type(None))  # values of groups that any message can hold
_NOT_SENT = object()


class OptimizerStates(defaultdict[Any, Any]):
    """The states of an optimizer by its own tensors; for a user's parameter, views of its part.

    So a callback finds state by the model's parameters, and may write to the state.

    Args:
        of: returns the state of a parameter of the user; None for anything else.
    """

    def __init__(self, of: Callable[[object], dict[str, Any] | None]) -> None:
        super().__init__(dict)
        self._of = of

    def __contains__(self, tensor: object) -> bool:
        return super().__contains__(tensor) or bool(self._of(tensor))

    def __missing__(self, tensor: Any) -> Any:
        found = self._of(tensor)
        return super().__missing__(tensor) if found is None else found

    def get(self, tensor: Any, default: Any = None) -> Any:
        """Return the state of a tensor, if there is any."""
        found = super().get(tensor)
        return self._of(tensor) or default if found is None else found


def values_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a group, without its parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def storable_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a group for checkpoints: without functions."""
    return {key: value for key, value in values_of(group).items() if not callable(value)}


def sent_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a group that owners of slices receive before an update.

    Sent are numbers, texts, tensors of one element as numbers, and tuples of these.
    """
    sent = {key: _sent(value) for key, value in values_of(group).items()}
    return {key: value for key, value in sent.items() if value is not _NOT_SENT}


def _sent(value: object) -> Any:
    """Return a value as messages have it; ``_NOT_SENT`` if no message can have it."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (tuple, list)):
        sent = tuple(_sent(each) for each in value)
        return _NOT_SENT if _NOT_SENT in sent else sent
    return value if isinstance(value, _PLAIN) else _NOT_SENT


def put_values(group: dict[str, Any], sent: Mapping[str, Any]) -> None:
    """Set the values of ``sent_values`` in a group; tensors and lists of the group stay such."""
    group.update({key: _put(group.get(key), value) for key, value in sent.items()})


def _put(there: Any, value: Any) -> Any:
    """Return a sent value for the place of ``there``."""
    if isinstance(there, torch.Tensor):
        return there.fill_(value)
    if not isinstance(value, (tuple, list)):  # messages turn tuples into lists
        return value
    known = there if isinstance(there, (tuple, list)) and len(there) == len(value) else value
    return (list if isinstance(there, list) else tuple)(map(_put, known, value))


def is_by_element(entry: str, value: object) -> bool:
    """Return whether a state entry of an element-wise optimizer has a value for each element."""
    return isinstance(value, torch.Tensor) and entry not in COUNTERS


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether the update of an element is independent of the tensor around the element."""
    return (
        type(optimizer) in ELEMENTWISE
        and not any(group.get("differentiable") for group in optimizer.param_groups)
        and not has_step_hooks(optimizer)
    )


def leaves_it_open(kind: type[Optimizer], group: dict[str, Any]) -> bool:
    """Return whether a group's options leave the kernel open, and the fused kernel is correct."""
    chosen = group["fused"] is not None or group["foreach"] is not None or group.get("capturable")
    if group.get("dampening"):  # not for the first gradient: see ``fill_momenta``
        return False
    # torch's fused SGD omits most elements of 16-bit tensors on CPUs, without an error.
    narrow = (torch.bfloat16, torch.float16)
    if kind is torch.optim.SGD and any(t.is_cpu and t.dtype in narrow for t in group["params"]):
        return False
    return not chosen and not any(tensor.is_complex() for tensor in group["params"])


def fill_momenta(sgd: Optimizer) -> None:
    """Fill missing momenta of fused SGD with zeros where a group has both missing and present.

    Fused SGD takes all momenta or none. Starting from zeros, the first momentum becomes the
    gradient, exactly as without a momentum.
    """
    for group in sgd.param_groups:
        if not (group["fused"] and group["momentum"]):
            continue
        updated = [tensor for tensor in group["params"] if tensor.grad is not None]
        late = [t for t in updated if sgd.state[t].get("momentum_buffer") is None]
        if len(late) < len(updated):
            for tensor in late:
                sgd.state[tensor]["momentum_buffer"] = torch.zeros_like(tensor)


def entries_of(
    kind: type[Optimizer], tensor: torch.Tensor, group: dict[str, Any]
) -> frozenset[str]:
    """Return the names of the state entries for a tensor of a group, found by a trial step."""
    example = torch.nn.Parameter(torch.zeros(1, dtype=tensor.dtype, device=tensor.device))
    example.grad = torch.zeros_like(example)
    options = copy.deepcopy(values_of(group))
    optimizer = kind([{**options, "params": [example]}])  # type: ignore[call-arg]
    optimizer.step()
    made = optimizer.state[example].items()
    return frozenset(entry for entry, value in made if isinstance(value, torch.Tensor))


def require_state_of(
    kind: type[Optimizer],
    state: Mapping[str, tuple[Mapping[str, Any], Section]],
    tensor: torch.Tensor,
    group: dict[str, Any],
) -> None:
    """Compare the state of parameters with the state expected by the optimizer.

    Args:
        state: entries and section by parameter; all parameters lie in the same tensor of a group.

    Raises:
        CheckpointError: an entry is missing, or has a wrong shape or dtype.
    """
    expected = entries_of(kind, tensor, group)
    for name, (entries, section) in state.items():
        for entry in (*expected, *entries) if entries else ():
            value, of_one = entries.get(entry), entry in COUNTERS
            shape = () if of_one else section.shape
            if entry not in expected and not isinstance(value, torch.Tensor):
                continue
            if not isinstance(value, torch.Tensor) or value.shape != shape:
                got = str(tuple(value.shape)) if isinstance(value, torch.Tensor) else repr(value)
                expects = f"a tensor of {shape}"
            elif value.dtype != tensor.dtype and not (of_one and value.is_floating_point()):
                got, expects = str(value.dtype), str(tensor.dtype)
            elif of_one and not 0 <= float(value) < inf:
                got, expects = str(float(value)), "a number from 0 on"
            else:
                continue
            raise CheckpointError(
                f"optimizer state: {entry!r} of {name!r}",
                got=got,
                expected=f"{expects} as in this run",
                fix="use the optimizer of the first run",
            )


def piece_of_state(entry: str, value: Any, start: int, size: int) -> Any:
    """Return the part of a state entry that belongs to a piece of the tensor."""
    if is_by_element(entry, value):
        return value[start : start + size]
    return value.clone() if isinstance(value, torch.Tensor) else value


def kind_of_state(entries: dict[str, Any]) -> dict[str, Any]:
    """Return the properties that must be equal for parameters sharing an optimizer tensor."""
    return {
        entry: float(value) if entry in COUNTERS else type(value).__name__
        for entry, value in sorted(entries.items())
    }


# --- gradients by rows ----------------------------------------------------------------------------

# Found by a step of each optimizer on a table of two rows, because torch's optimizers raise in
# their step otherwise: the trial step shows the error before training, not in the first update.
THEY_DO = "SGD without momentum and weight decay, Adagrad without weight decay, or SparseAdam"


def kept_by_rows(
    optimizer: Optimizer, groups: Iterable[tuple[dict[str, Any], list[str]]], found: GradKinds
) -> frozenset[str]:
    """Return the parameters whose gradients an optimizer receives by rows.

    All other gradients computed by rows are made dense.

    Args:
        groups: the groups as made by the script, and the names of the parameters of each.

    Raises:
        SettingError: the optimizer takes no gradient by rows, or no dense gradient.
    """
    kept, dense = set[str](), list[str]()
    for group, names in groups:
        by_rows = [name for name in names if name in found.by_rows]
        if by_rows and _takes_rows(optimizer, group, by_rows[0]):
            kept |= {*by_rows}
        dense += [name for name in names if name in found.dense]
    if isinstance(optimizer, torch.optim.SparseAdam) and dense:
        expected = f"one that takes dense gradients too: {dense[0]!r} has one"
        fix = "take SGD or Adagrad for all; or Adam, and leave sparse=True out"
        raise SettingError("optimizer", type(optimizer).__name__, expected, fix)
    return frozenset(kept)


def _takes_rows(optimizer: Optimizer, group: dict[str, Any], name: str) -> bool:
    """Return whether parameters of a group receive gradients by rows; else these are made dense.

    They are made dense where the optimizer would keep a state by rows. With a momentum, every row
    that was ever read moves in each update, so that the state grows to a whole table; and a
    checkpoint cannot hold a state by rows.

    Raises:
        SettingError: the optimizer, torch's or another, refuses such a gradient.
    """
    if needs_closure(optimizer):
        raise _refused(optimizer, name, "it wants several gradients for an update")
    example = torch.nn.Parameter(torch.zeros(2, 1))
    try:
        options = copy.deepcopy(values_of(group))
        trial = type(optimizer)([{**options, "params": [example]}])  # type: ignore[call-arg]
    except Exception:  # made in another way: training will show an error, if any
        return True
    index, values = torch.tensor([[1]]), torch.ones(1, 1)
    example.grad = torch.sparse_coo_tensor(
        index, values, (2, 1), is_coalesced=True, check_invariants=False
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trial.step()
    except Exception as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        raise _refused(optimizer, name, why) from None
    kept = [value for value in trial.state[example].values() if isinstance(value, torch.Tensor)]
    return not any(value.is_sparse for value in kept)


def _refused(optimizer: Optimizer, name: str, why: str) -> SettingError:
    expected = f"one that takes the gradient of {name!r}, which comes by rows (sparse=True): {why}"
    fix = f"take {THEY_DO}; or leave sparse=True out"
    return SettingError("optimizer", type(optimizer).__name__, expected, fix)
