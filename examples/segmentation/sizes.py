"""Images that are mapped into memory: the earth in several sizes, made once and cached.

Legend: C channels, H rows, W columns of the image; that of size k is 2**k times as narrow.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import data
import numpy as np
import torch
from data import Pixels
from legend import IGNORED

from quorate.data import cache_dir


class Level(NamedTuple):
    """An image in one size, padded with ignored pixels to whole tiles."""

    pixels: torch.Tensor  # (C, H, W) uint8
    classes: torch.Tensor  # (H, W) uint8
    height: int  # without padding
    width: int
    size: int = 0  # 0: in full, 1: in half, ...


def opened(
    image_path: Path, mask_path: Path, *, many: int, colour: bool, side: int, groups: int
) -> list[Level]:
    """The earth in so many sizes, mapped into memory; made and cached at the first call.

    Args: see ``tiles.load``; files as ``data.files`` gives them.
    """
    content = hashlib.sha256(image_path.read_bytes())
    content.update(mask_path.read_bytes())
    kind = f"{'colour' if colour else 'grey'}-{groups}-{many}-{side}"
    cache = cache_dir() / "segmentation" / f"{kind}-{content.hexdigest()[:16]}"
    if not cache.is_dir():
        pixels = data.image(image_path, colour=colour)
        classes = data.mask(mask_path, pixels, image_path=image_path, groups=groups)
        with made_whole(cache) as folder:
            _write(folder, pixels, classes, many, side)
    return [
        Level(
            _mapped(cache / f"pixels-{k}.npy"),
            _mapped(cache / f"classes-{k}.npy"),
            *map(int, np.load(cache / f"size-{k}.npy")),
            k,
        )
        for k in range(many)
    ]


def _mapped(path: Path) -> torch.Tensor:
    # Copy on write: torch wants memory that it may write. Nobody does.
    return torch.from_numpy(np.load(path, mmap_mode="c"))


def _write(folder: Path, pixels: Pixels, classes: Pixels, many: int, side: int) -> None:
    """All sizes, of one file each."""
    for k in range(many):
        np.save(folder / f"size-{k}.npy", np.array(classes.shape))
        np.save(folder / f"pixels-{k}.npy", padded(pixels, 0, side))
        np.save(folder / f"classes-{k}.npy", padded(classes, IGNORED, side))
        pixels, classes = _halved(pixels), classes[::2, ::2]
        classes = classes[: pixels.shape[1], : pixels.shape[2]]


@contextmanager
def made_whole(cache: Path) -> Iterator[Path]:
    """A folder to write into, which is ``cache`` at the end, or nothing if that failed."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{cache.name}-", dir=cache.parent) as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        yield made
        try:
            os.replace(made, cache)
        except OSError:
            if not cache.is_dir():  # else another process was first, with the same
                raise


def padded(values: Pixels, fill: int, side: int) -> Pixels:
    """To whole tiles, below and at the right."""
    height, width = values.shape[-2:]
    margins = [(0, 0)] * (values.ndim - 2) + [(0, -height % side), (0, -width % side)]
    return np.pad(values, margins, constant_values=fill)


def _halved(pixels: Pixels) -> Pixels:
    """Means over squares of four pixels, (C, H, W) -> (C, H // 2, W // 2)."""
    channels, height, width = pixels.shape
    squares = pixels[:, : height // 2 * 2, : width // 2 * 2].astype(np.uint16)
    squares = squares.reshape(channels, height // 2, 2, width // 2, 2)
    means: Pixels = ((squares.sum((2, 4)) + 2) // 4).astype(np.uint8)
    return means
