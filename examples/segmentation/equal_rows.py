"""64 tiles to an update against 16, at equal rows: what a batch that lacks classes does.

    python examples/segmentation/equal_rows.py                          # a 25th of it, two seeds
    python examples/segmentation/equal_rows.py --rows 800000            # 12,500 of 64, 50,000 of 16

A tile shows one class or a few, of which a small batch may lack some: what then becomes of them?
Each run trains on as many tiles, by fewer updates of larger batches, whose shards have 16 tiles
whatever the batch (BatchNorm has the same rows in both). Of each update it is noted which classes
its batch lacked, and how far its gradient points from the one before. The intersection over union
is measured all the while at equal rows, and in the middle of the run after each of --closely
updates, so that it is seen what one update does to a class that its batch had, and to one that it
lacked. Results are a line of JSON for each run; equal_rows_plot.py draws them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tiles
import torch
from loss import iou, loss_with
from numpy.typing import NDArray
from recipe import Recipe, turned
from tiles import Tiles, class_weights
from torch.utils.data import Subset

import quorate
from quorate.coordination.plan import permutation


def main() -> None:
    """Train each, and write down what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--batch-sizes", type=int, nargs="+", default=[16, 64])
    add("--rows", type=int, default=32_000, help="tiles of a run: 2,000 updates of 16")
    add("--seeds", type=int, nargs="+", default=[0, 1])
    add("--lr", type=float, nargs="+", default=[2e-3], help="one for all, or for each size")
    add("--constant", action="store_true", help="a rate that neither rises nor falls")
    add("--side", type=int, default=64, help="pixels of a tile")
    add("--sizes", type=int, default=1, help="of the earth, each half of the one before")
    add("--groups", type=int, choices=(4, 8), default=8)
    add("--tested", type=int, default=256, help="tiles of the bands held out, while it trains")
    add("--every", type=int, default=1280, help="rows from one test to the next")
    add("--closely", type=int, default=64, help="updates in the middle, with a test after each")
    add("--devices", default="cpu", help="such as cuda:0,cuda:1")
    add("--data", type=Path, help="a folder with bmng.jpg and zones.png")
    add("--out", type=Path, default=Path("runs/equal_rows.jsonl"))
    options = parser.parse_args()
    rates = options.lr * (len(options.batch_sizes) if len(options.lr) == 1 else 1)
    if len(rates) != len(options.batch_sizes):
        sys.exit(f"equal_rows.py: {len(rates)} rates for {len(options.batch_sizes)} sizes")
    train, test = tiles.load(
        options.data, colour=True, side=options.side, groups=options.groups, many=options.sizes
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for size, lr in zip(options.batch_sizes, rates, strict=True):
            with options.out.open("a") as out:
                out.write(json.dumps(run(options, train, test, size, lr, seed)) + "\n")


class Noted(torch.optim.AdamW):
    """AdamW that notes how far each gradient points from the one before.

    quorate knows no elementwise optimizer of this class, and gives it the ordinary parameters with
    the gradient of the whole batch: the mean over all shards.
    """

    cosines: list[float]
    norms: list[float]

    def step(self, closure: Any = None) -> Any:
        """Make the update, and note cosine and norm."""
        own = [p.grad for group in self.param_groups for p in group["params"]]
        gradient = torch.cat([each.reshape(-1) for each in own if each is not None])
        norm = float(gradient.norm())
        if self.norms:
            product = float(gradient @ self._before)
            self.cosines.append(product / max(norm * self.norms[-1], 1e-30))
        self.norms.append(norm)
        self._before = gradient.clone()
        return super().step(closure)


def run(
    options: argparse.Namespace, train: Tiles, test: Tiles, size: int, lr: float, seed: int
) -> dict[str, Any]:
    """One training, with all that is noted of it."""
    updates = options.rows // size
    recipe = Recipe(batch_size=size, updates=updates, lr=lr, seed=seed)
    made: list[Noted] = []

    def optimizer(parameters: Any) -> Noted:
        noted = Noted(parameters, lr=lr, weight_decay=recipe.weight_decay)
        noted.cosines, noted.norms = [], []
        made.append(noted)
        return noted

    trainer = quorate.Trainer(
        partial(recipe.network, train),
        loss_with(class_weights(train), test.tested),
        totals={"confusion": partial(iou, legend=train.legend)},
        loading=quorate.Loading(augment=turned),
        optimizer=quorate.Optimize(
            optimizer, schedule=None if options.constant else recipe.schedule
        ),
        batch_size=size,
        shards=recipe.shards,
        seed=seed,
        devices=options.devices,
        workers=quorate.Workers(engine="towers"),
    )
    some = Subset(test, np.linspace(0, len(test) - 1, options.tested).round().astype(int).tolist())
    begun, closely_from = time.process_time(), updates // 2
    curve, closely, losses = [], [], []
    for report in trainer.updates(train, steps=updates):
        step = report.global_step
        losses.append(report.loss)
        is_close = closely_from <= step <= closely_from + options.closely
        if is_close or step * size % options.every == 0:
            found = trainer.evaluate(some)
            values = [found[f"{name}_iou"] for name in (*test.legend.metrics, "mean")]
            if is_close:
                closely.append([step, *values])
            if step * size % options.every == 0:
                curve.append([step * size, *values])
    whole = trainer.evaluate(test)
    has = np.array(list(_classes_of_batches(train, size, seed, updates)))
    print(
        f"{size} tiles, {updates:,} updates, rate {lr:g}, seed {seed}: mean IoU "
        f"{whole['mean_iou']:.4f}, {(~has).sum(1).mean():.2f} classes lacking in a batch, cosine "
        f"of one gradient and the next {np.mean(made[-1].cosines):.3f}; "
        f"{time.process_time() - begun:.0f} s of CPU",
        flush=True,
    )
    return {
        "batch_size": size,
        "updates": updates,
        "lr": lr,
        "constant": options.constant,
        "seed": seed,
        "classes": test.legend.names,
        "colours": test.legend.colours,
        "lacking": np.bincount((~has).sum(1), minlength=len(test.legend) + 1).tolist(),
        "lacks": (~has).mean(0).tolist(),  # share of batches, by class
        "cosines": made[-1].cosines,
        "norms": made[-1].norms,
        "losses": losses,
        "curve": curve,  # rows, IoU of each class, mean
        "closely": closely,  # step, likewise
        "close_has": has[closely_from : closely_from + options.closely].tolist(),
        "iou": [whole[f"{name}_iou"] for name in (*test.legend.metrics, "mean")],
        "cpu_s": time.process_time() - begun,
    }


def _classes_of_batches(
    train: Tiles, size: int, seed: int, updates: int
) -> Iterator[NDArray[np.bool_]]:
    """Of each update, whether its batch had each class: (K,)."""
    order = np.concatenate(
        [permutation(len(train), seed, epoch) for epoch in range(-(-updates * size // len(train)))]
    )
    for update in range(updates):
        seen = np.zeros(256, bool)
        for row in order[update * size : (update + 1) * size]:
            seen[train[int(row)][1].unique().numpy()] = True
        yield seen[: len(train.legend)]


if __name__ == "__main__":
    main()
