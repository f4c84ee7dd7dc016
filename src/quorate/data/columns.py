"""Columns of a ``TensorDataset``: the rows of a shard, or of neighbouring shards at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quorate.coordination.sampling import Rows
from quorate.replica.flat import ALIGNMENT_BYTES


class Column:
    """A tensor of all rows. The memory layout is examined once, not for each shard."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        # Indexing copies element by element: for images it takes up to 14 times as long.
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        is_plain = is_plain and tensor.is_cpu and tensor.is_contiguous()
        is_number = is_plain and not (tensor.is_quantized or tensor.is_complex())
        self.is_plain = is_number and not tensor.requires_grad
        self.row_bytes = tensor.stride(0) * tensor.element_size() if self.is_plain else 0

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Return ``tensor[index]``, in newly allocated memory.

        Args:
            index: (b,) int64, on the host.
        """
        return self._tensor.index_select(0, index) if self.is_plain else self._tensor[index]


class DatasetColumns:
    """The tensors of a dataset."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._columns = [Column(tensor) for tensor in tensors]

    def rows(self, rows: Rows) -> list[torch.Tensor]:
        """Return some rows of each tensor, in newly allocated memory.

        Args:
            rows: (b,) int64.
        """
        index = torch.from_numpy(rows)
        return [column.rows(index) for column in self._columns]

    def of_shards(self, rows: Rows, sizes: Sequence[int]) -> list[list[torch.Tensor]]:
        """Return the rows of neighbouring shards: a list of tensors per shard, as ``rows`` returns.

        The tensors are views of a single indexing result if their alignment equals that of separate
        results: alignment can change the bits returned by kernels, and another worker loads each
        shard separately.

        Args:
            rows: (b,) int64, the rows of all shards.
            sizes: number of rows of each shard.
        """
        index = torch.from_numpy(rows)
        columns = [_split(column, index, sizes) for column in self._columns]
        return [list(shard) for shard in zip(*columns, strict=True)]


def _split(column: Column, index: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
    """Return the rows of each shard."""
    if column.is_plain:
        whole = column.rows(index)
        begins = whole.data_ptr()  # address of the first row
        odd = [size for size in {*sizes[:-1]} if size * column.row_bytes % ALIGNMENT_BYTES]
        if begins % ALIGNMENT_BYTES == 0 and not odd:
            return torch.split_with_sizes(whole, sizes)
    ends = np.cumsum(sizes)[:-1].tolist()
    return [column.rows(each) for each in torch.tensor_split(index, ends)]
