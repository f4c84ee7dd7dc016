"""Tiles: square pieces of large images, by index. Nothing is copied.

Images lie in files that are mapped into memory: a tile is a view of one of them, and all
processes share the pages. The earth is there in several sizes, each half as wide as the one before:
the ground that a tile shows differs by a factor of 8 from one to the next, as do the details in it.

Of the earth bands of longitude are held out, from north to south: of a random tile the neighbours
would have been trained on.

Legend: C channels, H rows, W columns of the image, S pixels of a tile's side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import data
import numpy as np
import sizes
import torch
from legend import Legend
from sizes import Level
from torch.utils.data import Dataset

from quorate.errors import DataError

SIDE = 256  # pixels of a tile, if nobody says otherwise
LEVELS = 4  # sizes of the earth
TESTED = 2  # of which the first are tested
BAND = 512  # columns of a band, or two tiles: whole tiles at all tested levels


class Tile(NamedTuple):
    """Where a tile is."""

    level: int  # its image
    row: int  # of its first pixel
    column: int


class Tiles(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Views of image (C, S, S) and classes (S, S), both uint8, and the size of the image.

    Args:
        levels: the images.
        places: of the tiles.
        legend: of the classes, with S.
        tested: how many sizes are told apart when it is a test set.
    """

    def __init__(
        self, levels: list[Level], places: list[Tile], legend: Legend, tested: int = 1
    ) -> None:
        self.levels = levels
        self.places = places
        self.legend = legend
        self.tested = tested

    @property
    def channels(self) -> int:
        """C."""
        return self.levels[0].pixels.shape[0]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        k, row, column = self.places[number]
        side = self.legend.side
        rows, columns = slice(row, row + side), slice(column, column + side)
        level = self.levels[k]
        return level.pixels[:, rows, columns], level.classes[rows, columns], level.size


def load(
    folder: Path | None = None,
    *,
    colour: bool = False,
    side: int = SIDE,
    groups: int = 4,
    many: int = LEVELS,
    say: Callable[[str], None] = print,
) -> tuple[Tiles, Tiles]:
    """Tiles of the earth to train on, and tiles of the bands held out.

    Args:
        folder: of image and mask; default: fetched once.
        colour: three channels and not one.
        side: S.
        groups: how many classes, 4 or 8.
        many: in how many sizes the earth is trained on.

    Raises:
        DataError: see ``data``; or the image is too small to hold a band out.
    """
    image, mask = data.files(folder, say)
    levels = sizes.opened(image, mask, many=many, colour=colour, side=side, groups=groups)
    height, width = levels[0].height, levels[0].width
    at_test = min(TESTED, many)
    band = max(BAND, side << (at_test - 1))
    bands = [(number * band, (number + 1) * band) for number in range(width // band)]
    tested = [each for number, each in enumerate(bands) if number % 5 == 3]
    if not tested or height < side:
        got, expected = f"{width} x {height} pixels", f"at least {4 * band} x {side}"
        raise DataError(folder or data.IMAGE, got=got, expected=expected)
    edges = [0, *(edge for each in tested for edge in each), width]
    trained = list(zip(edges[::2], edges[1::2], strict=True))
    names, colours, _ = zip(*data.GROUPS[groups], strict=True)
    legend = Legend(names, colours, side)
    return (
        Tiles(levels, list(_overlapping(levels, trained, side)), legend, at_test),
        Tiles(levels, list(_side_by_side(levels[:at_test], tested, side)), legend, at_test),
    )


def _overlapping(levels: list[Level], bands: list[tuple[int, int]], side: int) -> Iterator[Tile]:
    """Tiles within bands; of a smaller image closer to each other, so that levels have alike."""
    for k, level in enumerate(levels):
        stride = max(1, side // 8 >> k)
        for left, right in bands:
            columns = starts(-(-left >> k), min(right >> k, level.width), side, stride)
            for row in starts(0, level.height, side, stride):
                yield from (Tile(k, row, column) for column in columns)


def starts(first: int, end: int, side: int, stride: int) -> list[int]:
    """Where pieces begin, that cover all from first to end; none, if it is too short for one."""
    last = end - side
    return [] if last < first else [*range(first, last, stride), last]


def _side_by_side(levels: list[Level], bands: list[tuple[int, int]], side: int) -> Iterator[Tile]:
    """Tiles that have every pixel of bands once; the padding below the image is ignored."""
    for k, level in enumerate(levels):
        for left, right in bands:
            for row in range(0, level.height, side):
                yield from (Tile(k, row, column) for column in range(left >> k, right >> k, side))


def class_weights(tiles: Tiles) -> list[float]:
    """What a pixel of each class counts: one over the root of its share, 1 on average.

    Without weights two thirds of the loss were of water, which is learned at once.
    """
    columns: dict[int, set[int]] = {}  # of the first pixels of tiles, by image in full size
    for place in tiles.places:
        if tiles.levels[place.level].size == 0:
            columns.setdefault(place.level, set()).add(place.column)
    counts = np.zeros(256, np.int64)
    for k, starting in columns.items():
        level = tiles.levels[k]
        covered = np.zeros(level.classes.shape[1], bool)
        for column in starting:
            covered[column : column + tiles.legend.side] = True
        counts += np.bincount(level.classes.numpy()[:, covered].reshape(-1), minlength=256)
    shares = counts[: len(tiles.legend)] / max(1, counts[: len(tiles.legend)].sum())
    weights = np.where(shares > 0, 1 / np.sqrt(np.maximum(shares, 1e-12)), 0.0)
    mean = float((weights * shares).sum())
    return [float(weight) / mean for weight in weights]
