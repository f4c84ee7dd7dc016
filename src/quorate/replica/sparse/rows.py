"""Rows of a gradient: the rows that are not zero, each once, in order.

A table of a million rows has a gradient in the few rows that a shard reads. So only these rows are
weighted, sent, summed and divided; the order of additions follows the tree of shards, as for
vectors.

Legend: n rows of the table, k of them in the gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

MOST_ROWS = 1 << 40  # more than any table has


class Rows(NamedTuple):
    """The rows of a gradient that are not zero."""

    which: torch.Tensor  # (k,) int64, ascending, each once
    values: torch.Tensor  # (k, ...), of the dtype of the parameter

    def add(self, right: Rows) -> Rows:
        """Return self + right: common rows are added, all others are kept.

        The sum of two numbers does not depend on their order, so no order is kept.
        """
        if torch.equal(self.which, right.which):  # a small table, or padded rows
            return Rows(self.which, self.values + right.values)
        # torch merges both in one pass, because both are sorted, and adds common rows. The number
        # of rows of the table is not needed: absent rows take no memory.
        shape = (MOST_ROWS, *self.values.shape[1:])
        both = _sparse(*self, shape) + _sparse(*right, shape)
        return Rows(both.indices()[0], both.values())

    def on(self, device: torch.device) -> Rows:
        """Return these rows on a device. Blocks until they are copied."""
        return Rows(self.which.to(device), self.values.to(device))

    def like(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the gradient of a parameter for torch's optimizers: sparse, coalesced."""
        return _sparse(*self, parameter.shape)

    def fault(self, parameter: torch.Tensor) -> str | None:
        """Return why received rows cannot belong to a parameter; None if they can."""
        index, values = self
        if index.dtype != torch.int64 or index.dim() != 1:
            return f"indices are {index.dtype} of {tuple(index.shape)}"
        if values.dtype != parameter.dtype or values.shape != (len(index), *parameter.shape[1:]):
            return f"values are {values.dtype} of {tuple(values.shape)}"
        if not len(index):
            return None
        if not (int(index[0]) >= 0 and int(index[-1]) < len(parameter)):
            return f"rows are {int(index[0])} to {int(index[-1])}"
        return None if bool((index[1:] > index[:-1]).all()) else "rows are in no order"


def is_by_rows(gradient: torch.Tensor) -> bool:
    """Return whether a gradient has rows, which ``rows_of`` uses directly."""
    return gradient.layout == torch.sparse_coo and gradient.sparse_dim() == 1


def rows_of(
    gradient: torch.Tensor, dtype: torch.dtype, device: torch.device, factor: float
) -> Rows:
    """Return a gradient multiplied by a factor, as rows of this dtype on this device.

    Rows that a shard reads several times are summed in the order of torch's ``coalesce``. The order
    depends on the indices alone, and is that of torch's optimizers.

    Args:
        gradient: sparse; or dense, if a shard reads a table in another way: then all rows.
    """
    gradient = gradient.detach()
    if not is_by_rows(gradient):
        values = gradient.to_dense() if gradient.is_sparse else gradient
        found = Rows(torch.arange(len(values), device=values.device), values)
    else:
        # In the dtype of the sum: bfloat16 would lose more with each addition.
        whole = (gradient if gradient.dtype == dtype else gradient.to(dtype)).coalesce()
        found = Rows(whole.indices()[0], whole.values())
        if not gradient.is_coalesced():  # then coalesce() has made new memory
            return Rows(found.which, found.values.mul_(factor)).on(device)
    # A copy: a gradient kept by user code is not written.
    return Rows(found.which, (found.values.to(dtype) * factor).contiguous()).on(device)


def _sparse(which: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return rows as a tensor of torch, in the same memory."""
    return torch.sparse_coo_tensor(
        which[None], values, shape, is_coalesced=True, check_invariants=False
    )
