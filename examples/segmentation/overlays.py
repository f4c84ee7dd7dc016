"""Pictures of what the network sees: the image, the true classes over it, and the guessed ones."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import Pixels
from legend import IGNORED, Legend
from PIL import Image
from tiles import Tiles

import quorate

GAP = 4  # white pixels between pictures


def overlay(pixels: Pixels, classes: Pixels, legend: Legend, share: float = 0.55) -> Pixels:
    """Classes as colours over an image.

    Args:
        pixels: (C, H, W).
        classes: (H, W); those that are ignored stay as in the image.
        legend: of the classes.
        share: of the colour.

    Returns:
        (H, W, 3).
    """
    below = np.broadcast_to(pixels.transpose(1, 2, 0), (*classes.shape, 3)).astype(np.float32)
    above = legend.palette[np.minimum(classes, len(legend) - 1)]
    mixed = np.where((classes == IGNORED)[..., None], below, (1 - share) * below + share * above)
    return mixed.round().astype(np.uint8)


def guessed(model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    """The classes (B, H, W) uint8 that a network guesses, which stays in the mode that it is in."""
    was_training = model.training
    device = next(model.parameters()).device
    model.eval()
    try:
        with torch.no_grad():
            return model(images.to(device)).argmax(1).to("cpu", torch.uint8)
    finally:
        model.train(was_training)


def picture(model: torch.nn.Module, tiles: Tiles, rows: Sequence[int] | None = None) -> Pixels:
    """For each tile a row: image, truth, guess; (H, W, 3). Default: those with the most classes."""
    rows = most_classes(tiles) if rows is None else rows
    shown = [tiles[row] for row in rows]
    guesses = guessed(model, torch.stack([pixels for pixels, _, _ in shown]))
    side = tiles.legend.side
    found = np.full((len(rows) * (side + GAP) - GAP, 3 * (side + GAP) - GAP, 3), 255, np.uint8)
    for row, ((pixels, classes, _), guess) in enumerate(zip(shown, guesses, strict=True)):
        nothing = np.full((side, side), IGNORED, np.uint8)
        hidden = classes.numpy() == IGNORED
        seen = np.where(hidden, IGNORED, guess.numpy())
        for column, each in enumerate((nothing, classes.numpy(), seen)):
            top, left = row * (side + GAP), column * (side + GAP)
            shown_here = overlay(pixels.numpy(), each, tiles.legend)
            found[top : top + side, left : left + side] = shown_here
    return found


def save(path: Path, pixels: Pixels, palette: Pixels | None = None) -> None:
    """Write a PNG, whole or not at all.

    Args:
        pixels: (H, W, 3), or (H, W) with a palette.
        palette: (K, 3), the colours of the numbers.
    """
    made = Image.fromarray(pixels)
    if palette is not None:
        made.putpalette(palette.tobytes())
    content = io.BytesIO()
    made.save(content, "png")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        file.write(content.getbuffer())
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)


class Overlays(quorate.Callback):
    """After each evaluation shows some tiles: as PNG in RUN_DIR/overlays, and in TensorBoard.

    Args:
        tiles: the test set.
    """

    def __init__(self, tiles: Tiles) -> None:
        self._tiles = tiles
        self._rows = most_classes(tiles)

    def started(self, trainer: Any) -> None:
        """See the class."""
        self._trainer = trainer

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:  # noqa: ARG002
        """See the class."""
        model = self._trainer.averaged_model or self._trainer.model
        shown = picture(model, self._tiles, self._rows)
        if self._trainer.run_dir is not None:
            save(self._trainer.run_dir / "overlays" / f"step-{global_step:06}.png", shown)
        if self._trainer.summaries is not None:
            self._trainer.summaries.add_image("overlays", shown, global_step, dataformats="HWC")


def most_classes(tiles: Tiles, many: int = 4) -> list[int]:
    """The numbers of tiles with the most classes, the rarest of which has the most pixels."""

    def variety(row: int) -> tuple[int, int]:
        counts = np.bincount(tiles[row][1].reshape(-1).numpy(), minlength=256)
        counts = counts[: len(tiles.legend)]
        return int((counts > 0).sum()), int(counts[counts > 0].min(initial=tiles.legend.side**2))

    return sorted(sorted(range(len(tiles)), key=variety, reverse=True)[:many])
