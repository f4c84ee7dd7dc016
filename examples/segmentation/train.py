"""Climates from a grey image of the earth. single.py is plain PyTorch, train.py has quorate.

    python examples/segmentation/single.py
    python examples/segmentation/train.py                                  # every device
    quorate run --devices cpu --workers 1 examples/segmentation/train.py   # one CPU worker
    quorate run --devices cuda:0,cuda:1 examples/segmentation/train.py     # two GPUs

Both end with exit code 1 if the mean IoU on bands of longitude that were held out is below
--target, or less than --margin above that of the run in --above, which --baseline made.
"""

from __future__ import annotations

import sys
from functools import partial

from loss import iou, loss_with
from overlays import Overlays
from recipe import Recipe, parse, sets, turned
from table import Table
from target import reached
from tiles import class_weights

import quorate


def main() -> None:
    """Train, evaluate, and say whether the target is reached."""
    options = parse(__doc__.splitlines()[0])
    recipe = Recipe.of(options)
    train, test = sets(options)
    trainer = quorate.Trainer(
        partial(recipe.network, train),
        loss_with(class_weights(train), test.tested),
        totals={"confusion": partial(iou, legend=train.legend)},
        loading=quorate.Loading(augment=turned),
        optimizer=quorate.Optimize(
            recipe.optimizer, schedule=recipe.schedule, ema_decay=recipe.ema_decay
        ),
        batch_size=recipe.batch_size,
        shards=recipe.shards,
        seed=recipe.seed,
        run_dir=quorate.RunDir(options.run_dir, save_every_s=60.0),
    )
    trainer.fit(
        train,
        steps=options.updates,
        validation=quorate.Validation(test, every_steps=options.evaluate_every),
        callbacks=[Table(test.legend, test.tested), Overlays(test)],
    )
    found = trainer.evaluate(test)
    print(f"results: {trainer.run_dir}  (quorate inspect {trainer.run_dir})")
    if not reached(found, test, options):
        sys.exit(1)


if __name__ == "__main__":
    main()
