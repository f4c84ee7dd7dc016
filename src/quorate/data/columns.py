"""Columns of a ``TensorDataset``: some rows of each, or those of neighbouring shards at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quorate.coordination.sampling import Rows
from quorate.replica.flat import ALIGNMENT_BYTES


class Column:
    """A tensor of all rows. How it lies is looked at once, and not for each shard."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        # Indexing works element by element: of images it takes up to 14 times as long.
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        is_plain = is_plain and tensor.is_cpu and tensor.is_contiguous()
        is_number = is_plain and not (tensor.is_quantized or tensor.is_complex())
        self.is_plain = is_number and not tensor.requires_grad
        self.row_bytes = tensor.stride(0) * tensor.element_size() if self.is_plain else 0

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Return ``tensor[index]``, in memory of its own.

        Args:
            index: (b,) int64, on the host.
        """
        return self._tensor.index_select(0, index) if self.is_plain else self._tensor[index]


class Columns:
    """The tensors of a dataset."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._columns = [Column(tensor) for tensor in tensors]

    def rows(self, rows: Rows) -> list[torch.Tensor]:
        """Return some rows of each, in memory of their own.

        Args:
            rows: (b,) int64.
        """
        index = torch.from_numpy(rows)
        return [column.rows(index) for column in self._columns]

    def of_shards(self, rows: Rows, sizes: Sequence[int]) -> list[list[torch.Tensor]]:
        """Return the rows of neighbouring shards: of each shard a list, as ``rows`` of its own.

        They are views of what was indexed at once, if they lie as if alone: alignment can change
        the bits that kernels return, and another worker loads a shard by itself.

        Args:
            rows: (b,) int64, of all of them.
            sizes: how many of them are of each.
        """
        index = torch.from_numpy(rows)
        columns = [_split(column, index, sizes) for column in self._columns]
        return [list(shard) for shard in zip(*columns, strict=True)]


def _split(column: Column, index: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
    """Return the rows of each shard."""
    if column.is_plain:
        whole = column.rows(index)
        begins = whole.data_ptr()  # of the first of them, and then of each after it
        odd = [size for size in {*sizes[:-1]} if size * column.row_bytes % ALIGNMENT_BYTES]
        if begins % ALIGNMENT_BYTES == 0 and not odd:
            return torch.split_with_sizes(whole, sizes)
    ends = np.cumsum(sizes)[:-1].tolist()
    return [column.rows(each) for each in torch.tensor_split(index, ends)]
