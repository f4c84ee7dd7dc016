"""Classes for a whole picture, of any size, by the network of a run.

    python examples/segmentation/predict.py runs/segmentation photograph.png

Writes photograph.classes.png, whose pixels are the numbers of the classes, with a palette, and
photograph.overlay.png, the same over the picture. The picture is cut into tiles that overlap by
half; what a tile says counts most in its middle, where it has context on all sides.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from data import CLASSES, Pixels, image
from model import network_of
from overlays import COLOURS, overlay, save
from tiles import SIDE

from quorate.errors import UserError

STRIDE = SIDE // 2
AT_ONCE = 8  # tiles in memory


def main() -> None:
    """Read, predict, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("image", type=Path)
    parser.add_argument("--out", type=Path, help="default: beside the image, as IMAGE.classes.png")
    options = parser.parse_args()
    out = options.out or options.image.with_suffix(".classes.png")
    try:
        model = network_of(options.run_dir)
        pixels = image(options.image, colour=model.channels == 3)
        classes = predicted(model, pixels)
    except UserError as error:
        sys.exit(f"predict.py: {error}")
    save(out, classes, COLOURS)
    shown = out.with_name(out.name.replace(".classes", "").removesuffix(".png") + ".overlay.png")
    save(shown, overlay(pixels, classes))
    shares = np.bincount(classes.reshape(-1), minlength=len(CLASSES)) / classes.size
    said = ", ".join(f"{name} {share:.1%}" for name, share in zip(CLASSES, shares, strict=True))
    print(f"{out}, {shown}: {said}")


@torch.no_grad()
def predicted(model: torch.nn.Module, pixels: Pixels) -> Pixels:
    """The class of every pixel, (H, W), of an image (C, H, W)."""
    height, width = pixels.shape[1:]
    # A picture smaller than a tile is continued by its last pixels.
    margins = [(0, 0), *((0, max(0, SIDE - length)) for length in (height, width))]
    wide = torch.from_numpy(np.pad(pixels, margins, mode="edge"))
    places = [(row, column) for row in starts(wide.shape[1]) for column in starts(wide.shape[2])]
    ramp = 1 - (torch.arange(SIDE) + 0.5 - SIDE / 2).abs() / (SIDE / 2)
    window = ramp[:, None] * ramp  # (SIDE, SIDE), above 0
    votes = torch.zeros(len(CLASSES), *wide.shape[1:])
    for first in range(0, len(places), AT_ONCE):
        some = places[first : first + AT_ONCE]
        batch = torch.stack([wide[:, r : r + SIDE, c : c + SIDE] for r, c in some])
        shares = F.softmax(model(batch), 1) * window
        for share, (row, column) in zip(shares, some, strict=True):
            votes[:, row : row + SIDE, column : column + SIDE] += share
    classes: Pixels = votes.argmax(0)[:height, :width].to(torch.uint8).numpy()
    return classes


def starts(length: int) -> list[int]:
    """Where tiles begin, that overlap by half and cover a length of at least one."""
    return [*range(0, length - SIDE, STRIDE), length - SIDE]


if __name__ == "__main__":
    main()
