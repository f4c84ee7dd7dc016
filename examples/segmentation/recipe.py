"""What single.py and train.py have in common: options, optimizer, schedule, augmentation."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import folder
import tiles
import torch
from model import OnePixel, UNet
from target import of_run
from tiles import Tiles
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import default_collate

from quorate import Draws
from quorate.data.images import turn
from quorate.errors import SettingError

GOOD = 0.62  # mean IoU of the earth in grey, four classes: a bar above what one pixel tells


def parse(description: str, *, threads: bool = False) -> argparse.Namespace:
    """The command line; with an option that is of use to a plain loop alone, ``--threads``."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument_group("data").add_argument
    add("--data", type=Path, help="bmng.jpg and zones.png; or images/ and masks/; see folder.py")
    add("--images", type=Path, help="a folder of pictures; with --masks, in place of --data")
    add("--masks", type=Path, help="a folder of pictures of the same names")
    add("--mask-suffix", default="", help="of a mask's name behind that of its picture")
    add("--classes", type=Path, help="see classes_file.py; default: classes.csv in --data")
    add("--ignore", type=int, default=255, help="the number in a mask that counts for nothing")
    add("--hold-out", type=int, default=5, help="one of so many pictures is tested")
    add("--groups", type=int, choices=(4, 8), default=4, help="classes of the earth")
    add("--colour", action="store_true", help="not in grey")
    add("--side", type=int, default=tiles.SIDE, help="pixels of a tile; a multiple of 32")
    add = parser.add_argument_group("recipe").add_argument
    add("--baseline", action="store_true", help="a network that sees one pixel")
    add("--widths", type=int, nargs="+", default=Recipe.widths, help="channels of the U-Net")
    add("--updates", type=int, default=Recipe.updates)
    add("--batch-size", type=int, default=Recipe.batch_size, help="tiles of an update")
    add("--shard-rows", type=int, default=Recipe.shard_rows, help="tiles of a shard")
    add("--lr", type=float, default=Recipe.lr, help="at its highest")
    add("--rise", type=float, default=Recipe.rise, help="share of the updates to get there")
    add("--weight-decay", type=float, default=Recipe.weight_decay, help="of AdamW")
    add("--ema-decay", type=float, help="of averaged weights, which are then the ones tested")
    add("--seed", type=int, default=Recipe.seed, help="of weights, order and turns")
    add = parser.add_argument_group("run").add_argument
    add("--evaluate-every", type=int, default=100, help="updates; train.py alone")
    add("--target", type=float, help=f"least mean IoU; of the earth in grey {GOOD}")
    add("--above", type=Path, metavar="RUN_DIR", help="of a run with --baseline")
    add("--margin", type=float, default=0.15, help="least distance to that one")
    add("--run-dir", type=Path, default=Path("runs/segmentation"))
    if threads:
        add("--threads", type=int, help="that compute; default: as torch does")
    options = parser.parse_args()
    if options.side < 32 or options.side % 32:
        raise SettingError("--side", options.side, "a multiple of 32", "pass --side 256")
    if options.above is not None:
        of_run(options.above)  # an error now is better than one after ten minutes
    return options


def sets(options: argparse.Namespace) -> tuple[Tiles, Tiles]:
    """What to train on, and what to test on, as the command line says; sets a target.

    Raises:
        DataError: there is none, or it is bad.
    """
    found = folder.splits(options.data, options.images, options.masks, options.hold_out)
    if found is not None:
        return folder.load(
            *found,
            colour=options.colour,
            side=options.side,
            classes=options.classes or folder.classes_of(options.data),
            mask_suffix=options.mask_suffix,
            ignore=options.ignore,
        )
    if options.target is None and options.groups == 4 and not options.colour:
        options.target = GOOD
    return tiles.load(options.data, colour=options.colour, side=options.side, groups=options.groups)


@dataclass(frozen=True)
class Recipe:
    """How a network is made and trained."""

    baseline: bool = False
    widths: Sequence[int] = (16, 32, 64, 96)
    batch_size: int = 32  # tiles
    shard_rows: int = 16  # tiles: BatchNorm has so many, of all scales, in each
    updates: int = 1200
    lr: float = 4e-3  # at its highest
    rise: float = 0.15  # share of the updates until then
    weight_decay: float = 1e-2
    ema_decay: float | None = None
    seed: int = 0

    @property
    def shards(self) -> int:
        """How many pieces a batch is cut into."""
        return max(1, self.batch_size // self.shard_rows)

    @classmethod
    def of(cls, options: argparse.Namespace) -> Recipe:
        """What the command line says."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})

    def network(self, data: Tiles) -> torch.nn.Module:
        """A new one, for such tiles."""
        shape = data.channels, len(data.legend)
        return OnePixel(*shape) if self.baseline else UNet(*shape, self.widths)

    def optimizer(self, parameters: Sequence[torch.nn.Parameter]) -> AdamW:
        """AdamW."""
        return AdamW(parameters, lr=self.lr, weight_decay=self.weight_decay)

    def schedule(self, optimizer: torch.optim.Optimizer) -> OneCycleLR:
        """Up for a share of the updates, then down to zero along a cosine."""
        return OneCycleLR(optimizer, self.lr, total_steps=self.updates + 1, pct_start=self.rise)

    def averaged(self, model: torch.nn.Module) -> AveragedModel | None:
        """A moving average of weights and buffers, for a plain loop; None without a decay."""
        if self.ema_decay is None:
            return None
        mean = get_ema_multi_avg_fn(self.ema_decay)
        return AveragedModel(model, multi_avg_fn=mean, use_buffers=True)


def turned(
    batch: Sequence[torch.Tensor], draws: Draws
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each tile in one of the eight symmetries of a square: four rotations, flipped or not."""
    images, classes, levels = batch
    turns = draws.integers(8)
    return turn(images, turns), turn(classes[:, None], turns)[:, 0], levels


def batches(
    data: Tiles, size: int, seed: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Turned tiles, epoch after epoch, each in an order of its own; without end."""
    for epoch in itertools.count():
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed + epoch))
        for rows in order.split(size):
            yield turned(default_collate([data[row] for row in rows]), Draws(seed, epoch, rows))
