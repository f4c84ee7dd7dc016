"""Images that are bright where their label says, as IDX files: easy to tell apart."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from open_data.fashion_mnist import TEST_IMAGES, TEST_LABELS, TRAIN_IMAGES, TRAIN_LABELS


def bright_images(folder: Path, train: int, test: int) -> Path:
    """Write a training set and a test set of so many rows, under the names of Fashion-MNIST's."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for images_name, labels_name, rows in (
        (TRAIN_IMAGES, TRAIN_LABELS, train),
        (TEST_IMAGES, TEST_LABELS, test),
    ):
        labels = generator.integers(0, 10, rows, dtype=np.uint8)
        images = generator.integers(0, 60, (rows, 28, 28), dtype=np.uint8)
        for row, label in enumerate(labels):
            images[row, 2 * label + 4 : 2 * label + 7] += 180
        header = struct.pack(">HBBIII", 0, 8, 3, rows, 28, 28)
        (folder / images_name).write_bytes(header + images.tobytes())
        (folder / labels_name).write_bytes(struct.pack(">HBBI", 0, 8, 1, rows) + labels.tobytes())
    return folder
