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

import tiles
from loss import iou, loss_with
from overlays import Overlays
from recipe import Recipe, parse, turned
from target import of_run, reached

import quorate


def main() -> None:
    """Train, evaluate, and say whether the target is reached."""
    options = parse(__doc__.splitlines()[0])
    recipe = Recipe.of(options)
    if options.above is not None:
        of_run(options.above)  # an error now is better than one after ten minutes
    train, test = tiles.load(options.data, colour=options.colour)
    trainer = quorate.Trainer(
        recipe.network,
        loss_with(tiles.class_weights(train)),
        totals={"confusion": iou},
        loading=quorate.Loading(augment=turned),
        optimizer=quorate.Optimize(recipe.optimizer, schedule=recipe.schedule),
        batch_size=recipe.batch_size,
        shards=recipe.shards,
        run_dir=quorate.RunDir(options.run_dir, save_every_s=60.0),
    )
    trainer.fit(
        train,
        steps=options.updates,
        validation=quorate.Validation(test, every_steps=100),
        callbacks=[Overlays(test)],
    )
    found = trainer.evaluate(test)
    print(f"results: {trainer.run_dir}  (quorate inspect {trainer.run_dir})")
    if not reached(found, options.target, options.above, options.margin):
        sys.exit(1)


if __name__ == "__main__":
    main()
