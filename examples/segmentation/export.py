"""The network of a run as a program of torch.export, which runs without this code; and checked.

    python examples/segmentation/export.py runs/segmentation [PICTURE]

Writes RUN_DIR/model.pt2, loads it again, and compares what it says of batches of 1, 2 and 5 tiles
with what the network says: batch, height and width are free, the sides in multiples of 32 from 64.
The tiles are of the picture, or of noise. Exit code 1 if logits differ by more than 0.0001 of the
largest.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from data import image
from legend import of_run
from model import OnePixel, UNet, network_of
from torch.export import Dim

from quorate.errors import UserError

STEP = 32  # pixels: the U-Net halves an image five times
LEAST = 2  # steps: torch.export takes a length of 1, which is that at the bottom, for a constant
FREE = {
    0: Dim("tiles"),
    2: STEP * Dim("rows", min=LEAST),
    3: STEP * Dim("columns", min=LEAST),
}
NEAR = 1e-4  # of the largest logit: other kernels may be chosen for another layout


def main() -> None:
    """Export, load, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("image", type=Path, nargs="?", help="to compare on; default: noise")
    parser.add_argument("--out", type=Path, help="default: RUN_DIR/model.pt2")
    options = parser.parse_args()
    out = options.out or options.run_dir / "model.pt2"
    try:
        model = network_of(options.run_dir)
        side = max(LEAST * STEP, of_run(options.run_dir, model.classes).side)
        batches = [tiles_of(options.image, model, n, side) for n in (1, 2, 5)]
        batches.append(tiles_of(options.image, model, 2, side + STEP))
    except UserError as error:
        sys.exit(f"export.py: {error}")
    torch.export.save(exported(model, side), out)
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB, images (B, {model.channels}, H, W) in bytes")
    if not compared(model, torch.export.load(out).module(), batches):
        sys.exit(1)


def exported(model: UNet | OnePixel, side: int) -> torch.export.ExportedProgram:
    """The program of a network in evaluation mode."""
    given = torch.zeros(2, model.channels, side, side, dtype=torch.uint8)
    return torch.export.export(model, (given,), dynamic_shapes=(FREE,))


def tiles_of(path: Path | None, model: UNet | OnePixel, many: int, side: int) -> torch.Tensor:
    """So many tiles, (B, C, S, S) in bytes, of a picture, or of noise.

    Raises:
        DataError: it is no picture.
    """
    if path is None:
        draw = torch.Generator().manual_seed(many)
        shape = many, model.channels, side, side
        return torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8)
    pixels = image(path, colour=model.channels == 3)
    margins = [(0, 0), *((0, max(0, side - length)) for length in pixels.shape[1:])]
    pixels = np.pad(pixels, margins, mode="edge")
    height, width = pixels.shape[1:]
    rows = np.linspace(0, height - side, many).astype(int)
    columns = np.linspace(0, width - side, many).astype(int)
    some = [pixels[:, r : r + side, c : c + side] for r, c in zip(rows, columns, strict=True)]
    return torch.from_numpy(np.stack(some))


@torch.no_grad()
def compared(model: torch.nn.Module, program: torch.nn.Module, batches: list[torch.Tensor]) -> bool:
    """Print how far a program is from a network; whether it is near enough."""
    good = True
    for batch in batches:
        expected, found = model(batch), program(batch)
        far = float((found - expected).abs().max() / expected.abs().max())
        same = float((found.argmax(1) == expected.argmax(1)).float().mean())
        print(
            f"{tuple(batch.shape)}: logits differ by {far:.1e} at most, {same:.2%} of classes equal"
        )
        good &= far <= NEAR
    return good


if __name__ == "__main__":
    main()
