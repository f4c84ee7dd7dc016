"""The optimizers for gradients by rows, found by a step of each on a table of two rows.

torch's optimizers raise in their step otherwise. The trial step shows the error before training,
and not in the first update.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from quorate.errors import SettingError
from quorate.replica.sparse.found import GradKinds
from quorate.training.optimizing.closure import needs_closure
from quorate.training.optimizing.known_optimizers import values_of

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
