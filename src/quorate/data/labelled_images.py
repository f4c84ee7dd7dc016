"""Images with integer labels, from the usual file formats of such data sets."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from quorate.data.idx import read_idx
from quorate.errors import DataError
from quorate.machine.regular_file import open_regular

ARRAYS = (("images", "labels"), ("x", "y"), ("x_train", "y_train"))  # possible names of the arrays


class LabelledImages(NamedTuple):
    """Images of one size, with an integer label for each image."""

    images: torch.Tensor  #: uint8 (N, H, W), or (N, H, W, C) or (N, C, H, W) as in the file
    labels: torch.Tensor  #: int64 (N,)


def read_idx_pair(images: Path, labels: Path, classes: int | None = None) -> LabelledImages:
    """Read images and labels from two IDX files, plain or gzip-compressed.

    Args:
        images: file with the images, uint8 (N, H, W).
        labels: file with the labels, integers (N,).
        classes: number of classes. If set, labels must be from 0 to ``classes - 1``.

    Raises:
        DataError: a file is missing or damaged, holds other data, or the files do not match.
    """
    return _checked(read_idx(images), images, read_idx(labels), labels, classes)


def read_npz(path: Path) -> LabelledImages:
    """Read images and labels from an .npz archive of NumPy arrays.

    The arrays are named images and labels, x and y, or x_train and y_train.

    Raises:
        DataError: the file is missing or damaged, holds other data, or the arrays do not match.
    """
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as arrays:
            images, labels = _pair(path, arrays)
    except FileNotFoundError:
        raise DataError(path, got="no such file", expected="an .npz file") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(path, got=" ".join(str(error).split()), expected="an .npz file") from error
    return _checked(images, path, labels, path, None)


def _pair(path: Path, arrays: Mapping[str, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    for images, labels in ARRAYS:
        if images in arrays and labels in arrays:
            pair = arrays[images], np.atleast_1d(arrays[labels].squeeze())
            for name, array in zip((images, labels), pair, strict=True):
                if array.dtype.kind not in "iufb":
                    got = f"array {name} of {array.dtype}"
                    raise DataError(path, got=got, expected="numbers")
            native = (np.ascontiguousarray(a, a.dtype.newbyteorder("=")) for a in pair)
            first, second = map(torch.from_numpy, native)
            return first, second
    wanted = ", ".join(" and ".join(pair) for pair in ARRAYS)
    got = f"the arrays {', '.join(arrays)}"
    raise DataError(path, got=got, expected=f"two named {wanted}")


def _checked(
    images: torch.Tensor,
    images_path: Path,
    labels: torch.Tensor,
    labels_path: Path,
    classes: int | None,
) -> LabelledImages:
    dims = (3,) if images_path != labels_path else (3, 4)
    if images.dtype != torch.uint8 or images.dim() not in dims:
        raise DataError(images_path, got=_form(images), expected="uint8 images (N, H, W)")
    if labels.is_floating_point() or labels.dim() != 1:
        raise DataError(labels_path, got=_form(labels), expected="whole numbers (N,)")
    if len(images) != len(labels):
        counts = f"{len(labels):,} labels"
        raise DataError(labels_path, got=counts, expected=f"{len(images):,}, as {images_path} has")
    if classes is not None:
        outside = ((labels < 0) | (labels >= classes)).nonzero()
        if len(outside):
            row = int(outside[0])
            got = f"label {int(labels[row])} in row {row:,}"
            raise DataError(labels_path, got=got, expected=f"labels from 0 to {classes - 1}")
    return LabelledImages(images, labels.to(torch.int64))


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
