"""Detection of gradients by rows: found by a trial shard, before any worker is started."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from quorate.errors import SettingError
from quorate.replica.flat import Flat


class GradKinds(NamedTuple):
    """The parameters with a known kind of gradient, by name."""

    by_rows: frozenset[str] = frozenset()
    dense: frozenset[str] = frozenset()


def found_in(model: torch.nn.Module, gradient: Flat | None, missing: Collection[str]) -> GradKinds:
    """Return the kinds of gradients of a trial shard.

    All parameters are covered if the layout keeps no gradients by rows, otherwise the parameters
    outside of tables kept by rows. A table not read by this shard counts by the setting of its
    module.

    Args:
        gradient: the gradient of a shard; None: there was no backward pass.
        missing: names of parameters without a gradient.
    """
    if gradient is None:
        return GradKinds()
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, kinds) and m.sparse}
    named = dict(model.named_parameters())
    unread = {name for name in missing if id(named.get(name)) in tables}
    by_rows = (gradient.made_dense.keys() | unread) & gradient.views.keys()
    return GradKinds(frozenset(by_rows), frozenset(gradient.views.keys() - by_rows - {*missing}))


def dense_text(names: Collection[str]) -> str:
    """Return the message about gradients by rows that are made dense for an optimizer."""
    listed = ", ".join(map(repr, sorted(names)[:3])) + (" and others" if len(names) > 3 else "")
    return (
        f"the gradient of {listed} comes by rows (sparse=True) and is made dense, because momentum "
        "also moves rows that a batch does not read; to keep gradients by rows, use an optimizer "
        "without momentum, Adagrad or SparseAdam"
    )


def no_rows(setting: str, got: str, name: str) -> SettingError:
    """Return the error of a setting that only exchanges whole vectors, for a gradient by rows."""
    expected = f"one that hands over the gradient of {name!r} by rows (sparse=True)"
    fix = "use engine='towers' or 'processes'; or leave sparse=True out"
    return SettingError(setting, got, expected, fix)
