"""A folder of pictures and masks, in each of the kinds that there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIZES = ((70, 100), (40, 33), (64, 64), (20, 25), (96, 40), (50, 50))  # rows, columns


COLOURS = ((0, 0, 0), (200, 10, 10), (10, 200, 10))


def truth(number: int) -> np.ndarray:
    """The classes of a picture, 0 to 2."""
    draw = np.random.default_rng(number)
    rows, columns = SIZES[number]
    coarse = draw.integers(0, 3, (-(-rows // 8), -(-columns // 8)))
    return np.kron(coarse, np.ones((8, 8), int))[:rows, :columns].astype(np.uint8)


def colours(number: int) -> np.ndarray:
    """A picture in which the classes can be told apart."""
    base = np.array([(40, 60, 200), (220, 180, 60), (60, 160, 60)], np.uint8)
    noise = np.random.default_rng(number).integers(0, 20, (*SIZES[number], 3), np.uint8)
    pixels: np.ndarray = base[truth(number)] + noise
    return pixels


def write(root: Path, kind: str, many: int = len(SIZES)) -> Path:
    """A root with images/ and masks/; masks by number, with a palette, or by colour."""
    for name in ("images", "masks"):
        (root / name).mkdir(parents=True)
    for number in range(many):
        Image.fromarray(colours(number)).save(root / "images" / f"{number}.png")
        classes = truth(number)
        made = {
            "numbers": lambda c: Image.fromarray(np.array([3, 7, 255], np.uint8)[c]),
            "palette": lambda c: Image.fromarray(c),
            "colours": lambda c: Image.fromarray(np.array(COLOURS, np.uint8)[c]),
        }[kind](classes)
        if kind == "palette":
            made.putpalette(np.array(COLOURS, np.uint8).tobytes())
        made.save(root / "masks" / f"{number}.png")
    if kind == "colours":
        lines = ["name,r,g,b", *(f"c{k},{r},{g},{b}" for k, (r, g, b) in enumerate(COLOURS))]
        (root / "classes.csv").write_text("\n".join(lines))
    return root


def load(example: Any, root: Path, **more: Any) -> tuple[Any, Any]:
    found = example.folder.splits(root, None, None, more.pop("hold_out", 5))
    assert found is not None
    common = {"colour": True, "side": 32, "classes": example.folder.classes_of(root)}
    return example.folder.load(*found, **(common | more))
