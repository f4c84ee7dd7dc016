"""A folder of images, and one of masks: any sizes, any classes.

One root holds both, as images/ and masks/, or a split each, as train/images, train/masks,
val/images and val/masks. Without a split every fifth picture by name is held out. The mask of a
picture has its name, and any ending that Pillow reads:

* one channel, or a palette: the numbers are the classes (classes.csv gives them names, else each
  number that occurs is one; 255 counts for nothing);
* colours: classes.csv says which class each is.

What is decoded of them, once, is in ``decoded``; one that is smaller than a tile is one tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import decoded
from decoded import Pair
from legend import IGNORED
from sizes import Level
from tiles import Tile, Tiles, starts

from quorate.errors import DataError, SettingError

IMAGES, MASKS = "images", "masks"
CLASSES = "classes.csv"
TRAIN, TEST = "train", ("val", "validation", "test")  # folders of a split
ENDINGS = frozenset((".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".webp"))


class Folders(NamedTuple):
    """Where images and masks of one split lie."""

    images: Path
    masks: Path

    @classmethod
    def below(cls, root: Path) -> Folders:
        """By their names."""
        return cls(root / IMAGES, root / MASKS)


def splits(
    root: Path | None, images: Path | None, masks: Path | None, hold_out: int
) -> tuple[Folders, Folders | int] | None:
    """Folders to train on; those to test on, or which part of the pictures is.

    Args:
        root: with images/ and masks/, or train/ and val/ with such.
        images: a folder, with ``masks``, in place of a root.
        masks: likewise.
        hold_out: one of so many is tested where there is no split.

    Returns:
        None where nothing of the sort is there: another kind of data is meant.

    Raises:
        SettingError: there are two of the three; or too much would be held out.
    """
    if hold_out < 2:
        raise SettingError("--hold-out", hold_out, "at least 2", "pass --hold-out 5")
    if images is not None or masks is not None:
        if images is None or masks is None or root is not None:
            got = "--data too" if root is not None else "one of them"
            expected, fix = "--images and --masks together", "or --data with both in it"
            raise SettingError("--images, --masks", got, expected, fix)
        return Folders(images, masks), hold_out
    if root is None:
        return None
    if (root / IMAGES).is_dir():
        return Folders.below(root), hold_out
    if (root / TRAIN / IMAGES).is_dir():
        for name in TEST:
            if (root / name / IMAGES).is_dir():
                return Folders.below(root / TRAIN), Folders.below(root / name)
        expected = " or ".join(f"{name}/{IMAGES}" for name in TEST)
        raise DataError(root, got=f"{TRAIN}/{IMAGES} alone", expected=f"{expected} beside it")
    return None


def classes_of(root: Path | None) -> Path | None:
    """The file of classes in a root; None: it has none."""
    path = None if root is None else root / CLASSES
    return path if path is not None and path.exists() else None


def load(
    train: Folders,
    test: Folders | int,
    *,
    colour: bool,
    side: int,
    classes: Path | None,
    mask_suffix: str = "",
    ignore: int = IGNORED,
    say: Callable[[str], None] = print,
) -> tuple[Tiles, Tiles]:
    """Tiles to train on, which overlap by half, and tiles of the pictures held out, side by side.

    Args:
        train: folders.
        test: folders, or n, to hold out every nth picture of the others.
        colour: three channels and not one.
        side: pixels of a tile.
        classes: see ``classes_file``; None: numbers in the masks are classes.
        mask_suffix: of a mask's name behind that of its picture.
        ignore: the number in a mask that counts for nothing, where no file says which.
        say: gets a line when pictures were decoded.

    Raises:
        DataError: names that do not match, pictures that are broken or not of the size of their
            mask, numbers or colours that no class has, or too few pictures.
    """
    pairs = pairs_of(train, mask_suffix)
    if isinstance(test, int):
        if len(pairs) < test:
            got, expected = (
                f"{len(pairs)} pictures",
                f"{test} or more, as one in {test} is held out",
            )
            raise DataError(train.images, got=got, expected=expected, fix="or pass --hold-out 2")
        held = [number % test == test - 1 for number in range(len(pairs))]
    else:
        others = pairs_of(test, mask_suffix)
        held = [False] * len(pairs) + [True] * len(others)
        pairs += others
    levels, legend = decoded.opened(
        pairs, classes, colour=colour, side=side, ignore=ignore, say=say
    )
    numbers = range(len(levels))
    return (
        Tiles(
            levels, list(_overlapping(levels, [n for n in numbers if not held[n]], side)), legend
        ),
        Tiles(levels, list(_side_by_side(levels, [n for n in numbers if held[n]], side)), legend),
    )


def pairs_of(folders: Folders, mask_suffix: str = "") -> list[Pair]:
    """Pictures with their masks, by name.

    Raises:
        DataError: there are none, or one has no other, or two.
    """
    images, masks = _pictures(folders.images, ""), _pictures(folders.masks, mask_suffix)
    for name, path in images.items():
        if name not in masks:
            expected = f"{name}{mask_suffix}.png, or of another ending"
            raise DataError(folders.masks, got=f"no mask of {path.name}", expected=expected)
    for name, path in masks.items():
        if name not in images:
            expected = f"{name}.png, or of another ending"
            raise DataError(
                folders.images, got=f"no picture of mask {path.name}", expected=expected
            )
    return [Pair(path, masks[name]) for name, path in images.items()]


def _pictures(folder: Path, suffix: str) -> dict[str, Path]:
    """From the name below a folder, without the suffix, to the path of each picture, by name."""
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).with_suffix("").as_posix()
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or path.suffix.lower() not in ENDINGS or not name.endswith(suffix):
            continue
        name = name.removesuffix(suffix)
        if name in found:
            got = f"{found[name].name} and {path.name}"
            raise DataError(folder, got=got, expected="one picture of each name")
        found[name] = path
    if not found:
        got = "no pictures" if folder.is_dir() else "no folder"
        expected = f"pictures named *{suffix} that end with one of {', '.join(sorted(ENDINGS))}"
        raise DataError(folder, got=got, expected=expected)
    return found


def _overlapping(levels: Sequence[Level], chosen: Sequence[int], side: int) -> Iterator[Tile]:
    for k in chosen:
        height, width = (max(side, length) for length in (levels[k].height, levels[k].width))
        for row in starts(0, height, side, side // 2):
            for column in starts(0, width, side, side // 2):
                yield Tile(k, row, column)


def _side_by_side(levels: Sequence[Level], chosen: Sequence[int], side: int) -> Iterator[Tile]:
    for k in chosen:
        for row in range(0, levels[k].height, side):
            yield from (Tile(k, row, column) for column in range(0, levels[k].width, side))
