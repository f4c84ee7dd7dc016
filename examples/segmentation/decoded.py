"""Images and masks of a folder, decoded once into flat files that are mapped into memory.

A picture is padded to whole tiles with ignored pixels. Files of their own would be too many to map:
a process may have 65,530 maps, and there are data sets of more tiles than that.

Legend: C channels, H rows, W columns of a picture, padded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import classes_file
import masks
import numpy as np
import torch
from classes_file import Key
from data import image
from legend import IGNORED, Legend
from numpy.typing import NDArray
from sizes import Level, made_whole, padded

from quorate.data import cache_dir
from quorate.errors import DataError


class Pair(NamedTuple):
    """A picture and its mask."""

    image: Path
    mask: Path


def opened(
    pairs: Sequence[Pair],
    classes: Path | None,
    *,
    colour: bool,
    side: int,
    ignore: int,
    say: Callable[[str], None],
) -> tuple[list[Level], Legend]:
    """The pictures, in their order; decoded anew when a file's size or time has changed.

    Args: see ``folder.load``.

    Raises:
        DataError: see ``folder.load``.
    """
    content = hashlib.sha256(repr((colour, side, ignore)).encode())
    for path in (*(path for pair in pairs for path in pair), *([classes] if classes else [])):
        try:
            now = path.stat()
        except OSError as error:
            raise DataError(path, got=error.strerror, expected="a file") from error
        content.update(f"{path.resolve()} {now.st_size} {now.st_mtime_ns}\n".encode())
    cache = cache_dir() / "segmentation" / f"folder-{content.hexdigest()[:16]}"
    if not cache.is_dir():
        if classes is None:
            key = masks.key_of((pair.mask for pair in pairs), ignore, side)
        else:
            key = classes_file.read(classes, side)
        with made_whole(cache) as folder:
            written = _decode(pairs, key, folder, colour=colour)
        say(f"{len(pairs):,} pictures, {written / 1e6:,.1f} MB, decoded into {cache}")
    return _levels(cache, side, channels=3 if colour else 1), _legend(cache, side)


def _decode(pairs: Sequence[Pair], key: Key, folder: Path, *, colour: bool) -> int:
    """Write pixels, classes, sizes and legend; return the bytes of the first two."""
    sizes, side = [], key.legend.side
    with (folder / "pixels.bin").open("wb") as pixels, (folder / "classes.bin").open("wb") as file:
        for pair in pairs:
            whole = image(pair.image, colour=colour)
            numbers = masks.classes(pair.mask, key)
            (height, width), (rows, columns) = whole.shape[1:], numbers.shape
            if (height, width) != (rows, columns):
                expected = f"{width} x {height} as {pair.image} has"
                raise DataError(pair.mask, got=f"{columns} x {rows} pixels", expected=expected)
            sizes.append((height, width))
            pixels.write(np.ascontiguousarray(padded(whole, 0, side)).data)
            file.write(np.ascontiguousarray(padded(numbers, IGNORED, side)).data)
    np.save(folder / "sizes.npy", np.array(sizes, np.int64))
    text = json.dumps({"names": key.legend.names, "colours": key.legend.colours})
    (folder / "legend.json").write_text(text)
    return sum((folder / f"{name}.bin").stat().st_size for name in ("pixels", "classes"))


def _levels(cache: Path, side: int, channels: int) -> list[Level]:
    sizes: NDArray[np.int64] = np.load(cache / "sizes.npy")
    pixels, classes = (_mapped(cache / f"{name}.bin") for name in ("pixels", "classes"))
    levels, first = [], 0
    for height, width in sizes.tolist():
        rows, columns = (-(-length // side) * side for length in (height, width))
        last = first + rows * columns
        whole = pixels[channels * first : channels * last].view(channels, rows, columns)
        levels.append(Level(whole, classes[first:last].view(rows, columns), height, width))
        first = last
    return levels


def _legend(cache: Path, side: int) -> Legend:
    read = json.loads((cache / "legend.json").read_text())
    return Legend(tuple(read["names"]), tuple((r, g, b) for r, g, b in read["colours"]), side)


def _mapped(path: Path) -> torch.Tensor:
    # Copy on write: torch wants memory that it may write. Nobody does.
    return torch.from_numpy(np.memmap(path, np.uint8, "c"))
