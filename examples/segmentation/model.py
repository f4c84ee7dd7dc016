"""The network: a U-Net, and one that sees a pixel at a time, to compare it with.

Ronneberger, Fischer and Brox, "U-Net", MICCAI 2015: what the image shows comes up from below, where
it is, from the side. This one begins at a quarter of the size, which takes a third of the time; the
borders of climates are no sharper than that.

Legend: B tiles, C channels, K classes, H rows, W columns of pixels.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import nn

from quorate import load_weights
from quorate.errors import DataError
from quorate.services.checkpoints import files

WEIGHTS, AVERAGED = "model.safetensors", "averaged.safetensors"


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Three by three, normalised."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Logits (B, K, H, W) of images (B, C, H, W) in bytes; H and W are multiples of 32.

    Args:
        channels: C.
        classes: K.
        widths: channels of the layers at a quarter, an eighth, ... of the size.
    """

    FIRST = "stem.0.0.weight"  # (16, C, 3, 3)
    LAST = "head.weight"  # (K, widths[0], 1, 1)

    def __init__(
        self, channels: int, classes: int = 4, widths: Sequence[int] = (16, 32, 64, 96)
    ) -> None:
        super().__init__()
        self.channels = channels
        self.classes = classes
        pairs = list(itertools.pairwise(widths))
        self.stem = nn.Sequential(
            convolution(channels, 16, stride=2), convolution(16, widths[0], stride=2)
        )
        self.down = nn.ModuleList(
            nn.Sequential(convolution(a, b, stride=2), convolution(b, b)) for a, b in pairs
        )
        self.up = nn.ModuleList(convolution(a + b, a) for a, b in reversed(pairs))
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """See the class."""
        x = self.stem(images / 127.5 - 1)
        beside = []
        for down in self.down:
            beside.append(x)
            x = down(x)
        for up in self.up:
            x = up(torch.cat([F.interpolate(x, scale_factor=2.0), beside.pop()], 1))
        return F.interpolate(self.head(x), scale_factor=4.0, mode="bilinear")


class OnePixel(nn.Module):
    """The same of each pixel by itself: what can be had without context."""

    FIRST = "layers.0.weight"  # (width, C)
    LAST = "layers.4.weight"  # (K, width)

    def __init__(self, channels: int, classes: int = 4, width: int = 32) -> None:
        super().__init__()
        self.channels = channels
        self.classes = classes
        self.layers = nn.Sequential(
            nn.Linear(channels, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """See the class."""
        if self.channels == 1:  # there are 256 different pixels: each is computed once
            values = torch.arange(256.0, device=images.device)[:, None]
            logits = F.embedding(images[:, 0].long(), self.layers(values / 127.5 - 1))
        else:
            logits = self.layers(images.permute(0, 2, 3, 1) / 127.5 - 1)
        return logits.permute(0, 3, 1, 2)


def network_of(run_dir: Path) -> UNet | OnePixel:
    """The network that a run has trained, in evaluation mode; with averaged weights if it has them.

    Which one it is, with how many channels, classes and units, is seen from its weights.

    Raises:
        UserError: there is no sound checkpoint, or it is of another model.
    """
    path = run_dir / WEIGHTS  # of single.py
    if not path.exists():
        found = files.find(run_dir)
        if found is None:
            raise DataError(run_dir, got="no checkpoint", expected="the directory of a run")
        averaged = found.path / AVERAGED
        path = averaged if averaged.exists() else found.path / WEIGHTS
    try:
        with safe_open(path, "pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.offset_keys()}
    except (OSError, SafetensorError) as error:
        raise DataError(path, got=f"{error}", expected="weights of this example") from error
    model: UNet | OnePixel
    if UNet.FIRST in shapes and UNet.LAST in shapes:
        down = (f"down.{number}.0.0.weight" for number in itertools.count())
        widths = [shapes[name][0] for name in itertools.takewhile(shapes.__contains__, down)]
        classes, first = shapes[UNet.LAST][:2]
        model = UNet(shapes[UNet.FIRST][1], classes, (first, *widths))
    elif OnePixel.FIRST in shapes and OnePixel.LAST in shapes:
        width, channels = shapes[OnePixel.FIRST]
        model = OnePixel(channels, shapes[OnePixel.LAST][0], width)
    else:
        raise DataError(path, got="other weights", expected="those of this example")
    load_weights(model, path, print)
    return model.eval()
