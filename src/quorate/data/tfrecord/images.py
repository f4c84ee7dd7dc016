"""Labelled images as TFRecord, with the features image_raw and label of TensorFlow's examples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quorate.data.labelled_images import LabelledImages
from quorate.data.tfrecord.dataset import TFRecordDataset
from quorate.data.tfrecord.example import Feature, Features, example
from quorate.data.tfrecord.framing import write_records


def write_images(path: str | Path, content: LabelledImages) -> int:
    """Write one record per image, with the pixels in memory order and the label.

    Returns:
        The number of records.

    Raises:
        OSError: the file cannot be written; an existing file is unchanged.
    """
    images, labels = content.images.numpy(), content.labels.tolist()
    return write_records(
        path,
        (
            example({"image_raw": image.tobytes(), "label": label})
            for image, label in zip(images, labels, strict=True)
        ),
    )


def read_images(
    paths: str | Path | Sequence[str | Path], shape: tuple[int, ...]
) -> TFRecordDataset:
    """Open files that ``write_images`` or TensorFlow wrote, as a dataset of (image, label).

    Args:
        paths: a path, or a list of paths.
        shape: shape of an image (uint8). Must match the sizes in the file; additional sizes of 1
            are allowed.

    Raises:
        DataError: a file is missing, damaged or empty.
    """
    features = {"image_raw": Feature("bytes", shape), "label": Feature("int64", ())}
    return TFRecordDataset(paths, Features(features))
