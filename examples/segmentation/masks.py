"""Masks: pictures whose pixels say which class they are, by number or by colour.

Legend: H rows, W columns of pixels.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from classes_file import Key
from data import Pixels, opened, whole
from legend import IGNORED, MOST_CLASSES, Legend, distinct
from numpy.typing import NDArray

from quorate.errors import DataError

MOST = 1 << 16  # numbers that a pixel may have


def classes(path: Path, key: Key) -> Pixels:
    """The class of every pixel, (H, W).

    Args:
        path: of the mask.
        key: with colours alone, the mask is read by colour; else by number, if it has one channel.

    Raises:
        DataError: it is no whole picture, or a pixel has a number or a colour of no class.
    """
    if key.colours and (not key.ids or not _has_numbers(path)):
        return _by_colour(path, key)
    table = np.full(MOST, -1, np.int16)
    for number, number_of_class in key.ids.items():
        table[min(number, MOST - 1)] = number_of_class
    numbers = _numbers(path)
    found = table[numbers]
    if (unknown := found < 0).any():
        row, column = np.argwhere(unknown)[0]
        raise DataError(
            path,
            got=f"number {numbers[row, column]} in row {row}, column {column}",
            expected=f"one of the {len(key.ids)} that mean something",
            fix="name it in the file of --classes",
        )
    return found.astype(np.uint8)


def _by_colour(path: Path, key: Key) -> Pixels:
    colours = opened(path, "RGB").astype(np.int32)
    codes = colours[..., 0] << 16 | colours[..., 1] << 8 | colours[..., 2]
    known = np.array(sorted(key.colours))
    table = np.array([key.colours[code] for code in known.tolist()], np.uint8)
    places = np.searchsorted(known, codes).clip(max=len(known) - 1)
    if (unknown := known[places] != codes).any():
        row, column = np.argwhere(unknown)[0]
        raise DataError(
            path,
            got=f"colour {','.join(map(str, colours[row, column]))} in row {row}, column {column}",
            expected=f"one of the {len(known)} in the file of --classes",
            fix="a picture that was compressed with loss is no mask",
        )
    return table[places]


def key_of(paths: Iterable[Path], ignore: int, side: int) -> Key:
    """A class for each number that occurs, in their order, but for the one that is ignored.

    Args:
        paths: of all masks; of the first that has a palette the colours are taken.
        ignore: the number that counts for nothing.
        side: of tiles, for the legend.

    Raises:
        DataError: a mask is no whole picture or has colours; there are too few numbers, or too
            many.
    """
    seen = np.zeros(MOST, bool)
    palette: NDArray[np.uint8] | None = None
    last = Path()
    for last in paths:
        numbers = _numbers(last)
        seen[np.unique(numbers)] = True
        palette = _palette(last) if palette is None else palette
    ids = [int(number) for number in np.flatnonzero(seen) if number != ignore]
    if not 2 <= len(ids) <= MOST_CLASSES:
        got = f"{len(ids)} different numbers in the masks ({', '.join(map(str, ids[:8]))}"
        raise DataError(
            last.parent,
            got=got + (", ...)" if len(ids) > 8 else f"; {ignore} is ignored)"),
            expected=f"2 to {MOST_CLASSES} classes",
            fix="say with --classes what the numbers mean",
        )
    colours = distinct(len(ids))
    if palette is not None and max(ids) < len(palette):
        chosen = [tuple(int(value) for value in palette[number]) for number in ids]
        colours = tuple((r, g, b) for r, g, b in chosen)
    legend = Legend(tuple(f"class {number}" for number in ids), colours, side)
    return Key(legend, {number: k for k, number in enumerate(ids)} | {ignore: IGNORED}, {})


def _has_numbers(path: Path) -> bool:
    with whole(path) as picture:
        return len(picture.getbands()) == 1


def _numbers(path: Path) -> NDArray[np.int32]:
    """The number of every pixel, (H, W), of a picture of one channel."""
    with whole(path) as picture:
        if len(picture.getbands()) != 1 or picture.mode == "F":
            raise DataError(
                path,
                got=f"colours (mode {picture.mode})",
                expected="a channel of numbers, or a file that says which colour is which class",
                fix="pass --classes with NAME,R,G,B in each line",
            )
        return np.asarray(picture).astype(np.int32).clip(0, MOST - 1)


def _palette(path: Path) -> NDArray[np.uint8] | None:
    with whole(path) as picture:
        colours = picture.getpalette("RGB") if picture.mode == "P" else None
        return None if colours is None else np.array(colours, np.uint8).reshape(-1, 3)
