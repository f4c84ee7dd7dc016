"""The representations of a shard's rows: tensors whose first dimension is rows.

Legend: n rows of a shard, B rows of a batch, V shards; a tensor may have another number of rows
than the shard (for example two views of each row).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from quorate.errors import LossError

_TENSOR, _TUPLE, _DICT = "tensor", "tuple", "dict"

Tensors = dict[str, torch.Tensor]


class Representations(NamedTuple):
    """The result of ``represent``, as named tensors."""

    kind: str  # of the container
    tensors: Tensors  # by name or index, each (n, ...)

    def returned(self) -> Any:
        """Return the tensors in the form of ``represent``'s result: a tensor, a tuple or a dict."""
        if self.kind == _TENSOR:
            return self.tensors[""]
        return tuple(self.tensors.values()) if self.kind == _TUPLE else dict(self.tensors)

    def widened(self) -> Representations:
        """Return the same tensors in at least float32.

        In 16 bits a loss over thousands of rows would lose the contribution of single rows, and so
        would its gradient with respect to a row.
        """
        return self._replace(tensors={n: _widened(t) for n, t in self.tensors.items()})

    def detached(self) -> Representations:
        """Return copies in new memory, without a graph."""
        return self._replace(tensors={n: _copied(t.detach()) for n, t in self.tensors.items()})


def taken_apart(returned: object) -> Representations:
    """Check the result of ``represent``, and split it into tensors.

    Raises:
        LossError: the result is no tensor, tuple, list or dict of tensors with rows.
    """
    named: Mapping[Any, Any]
    if isinstance(returned, torch.Tensor):
        kind, named = _TENSOR, {"": returned}
    elif isinstance(returned, Mapping):
        kind, named = _DICT, returned
    elif isinstance(returned, (tuple, list)):
        kind, named = _TUPLE, {str(place): part for place, part in enumerate(returned)}
    else:
        raise _no_rows(f"{type(returned).__name__} {returned!r:.60}")
    for name, part in named.items():
        where = "" if kind == _TENSOR else f" as item {name!r}"
        if not isinstance(part, torch.Tensor):
            raise _no_rows(f"{type(part).__name__}{where}")
        if part.dim() == 0 or part.is_complex() or not isinstance(name, str):
            raise _no_rows(f"a tensor of shape {tuple(part.shape)} and dtype {part.dtype}{where}")
    if not named:
        raise _no_rows("nothing")
    return Representations(kind, dict(named))


def join_shards(shards: Sequence[Representations]) -> Representations:
    """Return the rows of all shards, in order.

    Raises:
        LossError: shards have tensors of different names, dtypes or shapes beyond the rows.
    """
    first = _form(shards[0])
    for number, shard in enumerate(shards):
        if _form(shard) != first:
            raise LossError(
                "represent",
                got=f"{first} from shard 0 and {_form(shard)} from shard {number}",
                expected="the same names, dtypes and shapes from every shard, apart from the "
                "number of rows",
            )
    names = shards[0].tensors
    return shards[0]._replace(tensors={n: torch.cat([s.tensors[n] for s in shards]) for n in names})


def cut(whole: Mapping[str, torch.Tensor], shards: Sequence[Representations]) -> list[Tensors]:
    """Return each shard's rows of tensors (B, ...), as copies: the reverse of ``join_shards``."""
    each: list[Tensors] = [{} for _ in shards]
    for name, tensor in whole.items():
        sizes = [len(shard.tensors[name]) for shard in shards]
        for own, part in zip(each, torch.split(tensor, sizes), strict=True):
            own[name] = part.clone()
    return each


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    # Contiguous: strides are not sent over a wire.
    return tensor.clone(memory_format=torch.contiguous_format)


def _form(shard: Representations) -> dict[str, str]:
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} (n, {str(list(tensor.shape[1:]))[1:-1]})"
        for name, tensor in shard.tensors.items()
    }


def _no_rows(got: str) -> LossError:
    return LossError(
        "represent",
        got=got,
        expected="a tensor with rows as its first dimension, or a tuple or dict of such tensors",
    )
