"""Small files in the formats of the examples; the classes are easy to tell apart."""

import struct
from pathlib import Path

import numpy as np
from open_data.fashion_mnist import TEST_IMAGES, TEST_LABELS, TRAIN_IMAGES, TRAIN_LABELS
from PIL import Image
from support.example_modules import EXAMPLES, example_modules

from quorate.__main__ import main

with example_modules(EXAMPLES / "cifar10") as _cifar10:
    CIFAR10_FILES = _cifar10.data.FILES

COLOURS = ("red", "blue", "green", "white", "black", "grey", "brown", "pink", "gold")
THINGS = ("house", "car", "boat", "tree", "book", "lamp", "chair", "table", "horse", "shirt")
ZONE_OF = np.array([32, 6, 12, 30, 0], np.uint8)  # of the classes in order; and of none


def idx(images: Path, labels: Path, rows: int) -> None:
    """Write images, bright at the place of their label, and the labels, as IDX files."""
    draw = np.random.default_rng(rows)
    numbers = draw.integers(0, 10, rows, dtype=np.uint8)
    pixels = draw.integers(0, 60, (rows, 28, 28), dtype=np.uint8)
    for row, label in enumerate(numbers):
        pixels[row, 2 * label + 4 : 2 * label + 7] += 180
    images.write_bytes(struct.pack(">HBBIII", 0, 8, 3, rows, 28, 28) + pixels.tobytes())
    labels.write_bytes(struct.pack(">HBBI", 0, 8, 1, rows) + numbers.tobytes())


def fashion_mnist(folder: Path, train: int = 600, test: int = 64) -> None:
    """Write a training set and a test set of so many rows, under the names of Fashion-MNIST's."""
    idx(folder / TRAIN_IMAGES, folder / TRAIN_LABELS, train)
    idx(folder / TEST_IMAGES, folder / TEST_LABELS, test)


def mnist(folder: Path) -> None:
    """Write records of 256 and 60 rows, by ``quorate convert``."""
    for name, rows in (("train", 256), ("validation", 60)):
        pair = folder / f"{name}-images", folder / f"{name}-labels"
        idx(*pair, rows)
        assert main(["convert", *map(str, pair), str(folder / f"{name}.tfrecord")]) == 0


def cifar10(folder: Path) -> None:
    """Write images with stripes whose width is their label: 80 in each file."""
    for number, file in enumerate(CIFAR10_FILES):
        labels = np.arange(80, dtype=np.uint8) % 10
        lines = (np.arange(32) // (labels[:, None] + 1)) % 2  # (N, 32)
        noise = np.random.default_rng(number).integers(0, 100, (80, 3, 32, 32))
        images = (lines[:, None, :, None] * 120 + noise).astype(np.uint8)
        records = np.concatenate([labels[:, None], images.reshape(80, -1)], axis=1)
        records.tofile(folder / file.name)


def earth(folder: Path) -> None:
    """Write 2048 x 300 pixels: four classes, two of like brightness with stripes and squares."""
    draw = np.random.default_rng(3)
    classes = np.kron(draw.integers(0, 4, (5, 32)), np.ones((60, 64))).astype(np.uint8)
    row, column = np.indices(classes.shape)
    looks = [
        np.full(classes.shape, 40),
        90 + 60 * (row // 4 % 2),
        90 + 60 * ((row // 4 + column // 4) % 2),
        np.full(classes.shape, 220),
    ]
    grey = np.choose(classes, looks) + draw.normal(0, 5, classes.shape)
    zones = ZONE_OF[classes]
    zones[:5] = 0
    picture = Image.fromarray(grey.clip(0, 255).astype(np.uint8)).convert("RGB")
    picture.save(folder / "bmng.jpg", quality=95)
    Image.fromarray(zones).save(folder / "zones.png")


def pairs(folder: Path) -> None:
    """Write 270 questions with their answers, as ``pairs.tsv``."""
    lines = [
        f"{ask} the {colour} {thing}?\tthe {thing} is {colour} and {end}."
        for ask, end in (("what is", "cheap"), ("how is", "well"), ("where is", "here"))
        for colour in COLOURS
        for thing in THINGS
    ]
    (folder / "pairs.tsv").write_text("\n".join(lines) + "\n")
