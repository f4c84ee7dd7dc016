"""Labelled images as TFRecord, with the features image_raw and label of TensorFlow's examples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quorate.data.labelled_images import LabelledImages
from quorate.data.tfrecord.dataset import TFRecordDataset
from quorate.data.tfrecord.example import Feature, Features, example
from quorate.data.tfrecord.writer import write_records


def write_images(path: str | Path, content: LabelledImages) -> int:
    """Write a record for each image: its pixels as they lie in memory, and its label.

    Returns:
        How many there were.

    Raises:
        OSError: it cannot be written; nothing was changed.
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
    """Return the dataset of (image, label) in files that ``write_images`` wrote, or TensorFlow.

    Args:
        paths: A file, or several.
        shape: Of an image, uint8: all sizes must be its own, but there may be more of size 1.

    Raises:
        DataError: a file is missing, damaged or empty.
    """
    features = {"image_raw": Feature("bytes", shape), "label": Feature("int64", ())}
    return TFRecordDataset(paths, Features(features))
