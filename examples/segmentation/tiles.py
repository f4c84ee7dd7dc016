"""Tiles: pieces of 256 x 256 pixels of one large image, by index. Nothing is copied.

The image is kept in several sizes, each half as wide as the one before, in files that are mapped
into memory: a tile is a view of one of them. So the ground that a tile shows differs by a factor of
8 from one to the next, as do the details in it. All processes share the pages.

Bands of longitude are held out, from north to south: of a random tile the neighbours would have
been trained on.

Legend: C channels, H rows, W columns of the image; level k is 2**k times as narrow.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import data
import numpy as np
import torch
from data import IGNORED, Pixels
from torch.utils.data import Dataset

from quorate.data import cache_dir
from quorate.errors import DataError

SIDE = 256  # pixels of a tile
LEVELS = 4  # sizes of the image
TESTED = 2  # of which the first are tested
STRIDE = SIDE // 8  # from one tile to train on to the next, in the full size
BAND = SIDE << (TESTED - 1)  # columns of a band at level 0: whole tiles at all tested levels


class Level(NamedTuple):
    """The image in one size, padded with ignored pixels to whole tiles."""

    pixels: torch.Tensor  # (C, H, W) uint8
    classes: torch.Tensor  # (H, W) uint8
    height: int  # without padding
    width: int


class Tile(NamedTuple):
    """Where a tile is."""

    level: int
    row: int  # of its first pixel
    column: int


class Tiles(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Views of image (C, 256, 256) and classes (256, 256), both uint8, and the level."""

    def __init__(self, levels: list[Level], places: list[Tile]) -> None:
        self.levels = levels
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        k, row, column = self.places[number]
        rows, columns = slice(row, row + SIDE), slice(column, column + SIDE)
        level = self.levels[k]
        return level.pixels[:, rows, columns], level.classes[rows, columns], k


def load(
    folder: Path | None = None, *, colour: bool = False, say: Callable[[str], None] = print
) -> tuple[Tiles, Tiles]:
    """Tiles to train on, and tiles of the bands held out.

    Args:
        folder: of image and mask; default: fetched once.
        colour: three channels and not one.

    Raises:
        DataError: see ``data``; or the image is too small to hold a band out.
    """
    levels = opened(*data.files(folder, say), colour=colour)
    height, width = levels[0].height, levels[0].width
    bands = [(number * BAND, (number + 1) * BAND) for number in range(width // BAND)]
    tested = [band for number, band in enumerate(bands) if number % 5 == 3]
    if not tested or height < SIDE:
        got, expected = f"{width} x {height} pixels", f"at least {4 * BAND} x {SIDE}"
        raise DataError(folder or data.IMAGE, got=got, expected=expected)
    edges = [0, *(edge for band in tested for edge in band), width]
    trained = list(zip(edges[::2], edges[1::2], strict=True))
    return (
        Tiles(levels, list(_overlapping(levels, trained))),
        Tiles(levels, list(_side_by_side(levels[:TESTED], tested))),
    )


def _overlapping(levels: list[Level], bands: list[tuple[int, int]]) -> Iterator[Tile]:
    """Tiles within bands; of a smaller image closer to each other, so that levels have alike."""
    for k, level in enumerate(levels):
        for left, right in bands:
            columns = _starts(-(-left >> k), min(right >> k, level.width), STRIDE >> k)
            for row in _starts(0, level.height, STRIDE >> k):
                yield from (Tile(k, row, column) for column in columns)


def _starts(first: int, end: int, stride: int) -> list[int]:
    """Where pieces begin, that cover all from first to end; none, if it is too short for one."""
    last = end - SIDE
    return [] if last < first else [*range(first, last, stride), last]


def _side_by_side(levels: list[Level], bands: list[tuple[int, int]]) -> Iterator[Tile]:
    """Tiles that have every pixel of bands once; the padding below the image is ignored."""
    for k, level in enumerate(levels):
        for left, right in bands:
            for row in range(0, level.height, SIDE):
                yield from (Tile(k, row, column) for column in range(left >> k, right >> k, SIDE))


def class_weights(tiles: Tiles) -> list[float]:
    """What a pixel of each class counts: one over the root of its share, 1 on average.

    Without weights two thirds of the loss were of water, which is learned at once.
    """
    level = tiles.levels[0]
    covered = np.zeros(level.classes.shape[1], bool)
    for column in {place.column for place in tiles.places if place.level == 0}:
        covered[column : column + SIDE] = True
    counts = np.bincount(level.classes.numpy()[:, covered].reshape(-1), minlength=256)
    shares = counts[: len(data.CLASSES)] / max(1, counts[: len(data.CLASSES)].sum())
    weights = np.where(shares > 0, 1 / np.sqrt(np.maximum(shares, 1e-12)), 0.0)
    mean = float((weights * shares).sum())
    return [float(weight) / mean for weight in weights]


def opened(image_path: Path, mask_path: Path, *, colour: bool) -> list[Level]:
    """The image in all sizes, mapped into memory; made and cached at the first call."""
    content = hashlib.sha256(image_path.read_bytes())
    content.update(mask_path.read_bytes())
    kind = "colour" if colour else "grey"
    cache = cache_dir() / "segmentation" / f"{kind}-{LEVELS}-{content.hexdigest()[:16]}"
    if not cache.is_dir():
        pixels = data.image(image_path, colour=colour)
        _keep(cache, pixels, data.mask(mask_path, pixels, image_path=image_path))
    return [
        Level(
            _mapped(cache / f"pixels-{k}.npy"),
            _mapped(cache / f"classes-{k}.npy"),
            *map(int, np.load(cache / f"size-{k}.npy")),
        )
        for k in range(LEVELS)
    ]


def _mapped(path: Path) -> torch.Tensor:
    # Copy on write: torch wants memory that it may write. Nobody does.
    return torch.from_numpy(np.load(path, mmap_mode="c"))


def _keep(cache: Path, pixels: Pixels, classes: Pixels) -> None:
    """Write all sizes into a directory, which is there whole or not at all."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{cache.name}-", dir=cache.parent) as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        for k in range(LEVELS):
            np.save(made / f"size-{k}.npy", np.array(classes.shape))
            np.save(made / f"pixels-{k}.npy", _padded(pixels, 0))
            np.save(made / f"classes-{k}.npy", _padded(classes, IGNORED))
            pixels, classes = _halved(pixels), classes[::2, ::2]
            classes = classes[: pixels.shape[1], : pixels.shape[2]]
        try:
            os.replace(made, cache)
        except OSError:
            if not cache.is_dir():  # else another process was first, with the same
                raise


def _padded(values: Pixels, fill: int) -> Pixels:
    """To whole tiles, below and at the right."""
    height, width = values.shape[-2:]
    margins = [(0, 0)] * (values.ndim - 2) + [(0, -height % SIDE), (0, -width % SIDE)]
    return np.pad(values, margins, constant_values=fill)


def _halved(pixels: Pixels) -> Pixels:
    """Means over squares of four pixels, (C, H, W) -> (C, H // 2, W // 2)."""
    channels, height, width = pixels.shape
    squares = pixels[:, : height // 2 * 2, : width // 2 * 2].astype(np.uint16)
    squares = squares.reshape(channels, height // 2, 2, width // 2, 2)
    means: Pixels = ((squares.sum((2, 4)) + 2) // 4).astype(np.uint8)
    return means
