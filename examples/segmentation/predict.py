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
from data import Pixels, image
from legend import of_run
from model import OnePixel, UNet, network_of
from overlays import overlay, save

from quorate.errors import UserError

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
        legend = of_run(options.run_dir, model.classes)
        classes = predicted(model, pixels, legend.side)
    except UserError as error:
        sys.exit(f"predict.py: {error}")
    save(out, classes, legend.palette)
    shown = out.with_name(out.name.replace(".classes", "").removesuffix(".png") + ".overlay.png")
    save(shown, overlay(pixels, classes, legend))
    shares = np.bincount(classes.reshape(-1), minlength=len(legend)) / classes.size
    said = ", ".join(
        f"{name} {share:.1%}" for name, share in zip(legend.names, shares, strict=True)
    )
    print(f"{out}, {shown}: {said}")


@torch.no_grad()
def predicted(model: UNet | OnePixel, pixels: Pixels, side: int = 256) -> Pixels:
    """The class of every pixel, (H, W), of an image (C, H, W), by tiles of so many pixels."""
    height, width = pixels.shape[1:]
    # A picture smaller than a tile is continued by its last pixels.
    margins = [(0, 0), *((0, max(0, side - length)) for length in (height, width))]
    wide = torch.from_numpy(np.pad(pixels, margins, mode="edge"))
    places = [
        (row, column)
        for row in starts(wide.shape[1], side)
        for column in starts(wide.shape[2], side)
    ]
    ramp = 1 - (torch.arange(side) + 0.5 - side / 2).abs() / (side / 2)
    window = ramp[:, None] * ramp  # (side, side), above 0
    votes = torch.zeros(model.classes, *wide.shape[1:])
    for first in range(0, len(places), AT_ONCE):
        some = places[first : first + AT_ONCE]
        batch = torch.stack([wide[:, r : r + side, c : c + side] for r, c in some])
        shares = F.softmax(model(batch), 1) * window
        for share, (row, column) in zip(shares, some, strict=True):
            votes[:, row : row + side, column : column + side] += share
    classes: Pixels = votes.argmax(0)[:height, :width].to(torch.uint8).numpy()
    return classes


def starts(length: int, side: int) -> list[int]:
    """Where tiles begin, that overlap by half and cover a length of at least one."""
    return [*range(0, length - side, side // 2), length - side]


if __name__ == "__main__":
    main()
