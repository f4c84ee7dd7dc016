"""A folder of images and masks, cut from the earth: what --data takes, as a real example of it.

    python examples/segmentation/cut.py earth-tiles
    python examples/segmentation/train.py --data earth-tiles --colour

Writes train/ and val/ with images/ and masks/ each, and classes.csv. Masks are pictures with a
palette, or of colours with --by-colour. Pictures have several sizes, as those of a camera do not.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import data
import numpy as np
from folder import IMAGES, MASKS, TEST, TRAIN
from legend import IGNORED
from PIL import Image

from quorate.errors import UserError

HEIGHTS, WIDTHS = (300, 540, 400), (540, 360, 450)  # pixels, in turn


def main() -> None:
    """Cut and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="which is made")
    parser.add_argument("--by-colour", action="store_true", help="masks of colours")
    parser.add_argument("--groups", type=int, choices=(4, 8), default=8, help="classes")
    parser.add_argument("--data", type=Path, help="a folder with bmng.jpg and zones.png")
    options = parser.parse_args()
    try:
        image_path, mask_path = data.files(options.data)
        pixels = data.image(image_path, colour=True)
        classes = data.mask(mask_path, pixels, image_path=image_path, groups=options.groups)
        options.folder.mkdir(parents=True)
    except FileExistsError:
        sys.exit(f"cut.py: {options.folder}: got a folder that is there, expected a new one")
    except UserError as error:
        sys.exit(f"cut.py: {error}")
    groups = data.GROUPS[options.groups]
    palette = np.zeros((256, 3), np.uint8)  # ignored pixels are black
    palette[: len(groups)] = [group.colour for group in groups]
    for part, name in itertools.product((TRAIN, TEST[0]), (IMAGES, MASKS)):
        (options.folder / part / name).mkdir(parents=True)
    many = 0
    for band, (left, right) in enumerate(_pieces(pixels.shape[2], WIDTHS)):
        part = TEST[0] if band % 5 == 3 else TRAIN  # neighbours of a tile would give it away
        for top, bottom in _pieces(pixels.shape[1], HEIGHTS):
            name = f"{top:04}-{left:04}"
            piece = pixels[:, top:bottom, left:right].transpose(1, 2, 0)
            Image.fromarray(piece).save(options.folder / part / IMAGES / f"{name}.jpg", quality=92)
            numbers = np.ascontiguousarray(classes[top:bottom, left:right])
            mask = Image.fromarray(palette[numbers] if options.by_colour else numbers)
            if not options.by_colour:
                mask.putpalette(palette.tobytes())
            mask.save(options.folder / part / MASKS / f"{name}.png")
            many += 1
    lines = ["name,r,g,b" if options.by_colour else "name,id,r,g,b"]
    for number, (name, colour, _) in enumerate(groups):
        words = [name, *([] if options.by_colour else [number]), *colour]
        lines.append(",".join(map(str, words)))
    lines.append("ignored,0,0,0" if options.by_colour else f"ignored,{IGNORED},0,0,0")
    (options.folder / "classes.csv").write_text("\n".join(lines) + "\n")
    print(f"{options.folder}: {many} pictures and masks, and classes.csv")


def _pieces(length: int, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Where pieces of these sizes in turn begin and end; the last one is what is left."""
    edges = [0, *itertools.accumulate(itertools.islice(itertools.cycle(sizes), length))]
    edges = [edge for edge in edges if edge < length] + [length]
    return list(itertools.pairwise(edges))


if __name__ == "__main__":
    main()
