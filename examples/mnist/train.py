"""Digits, as TFRecord files. single.py is plain PyTorch on one device, train.py has quorate.

    python examples/mnist/single.py
    python examples/mnist/train.py                                  # every device
    quorate run --devices cpu --workers 1 examples/mnist/train.py   # one CPU worker
    quorate run --devices cuda:0,cuda:1 examples/mnist/train.py     # two GPUs

Both end with exit code 1 if the accuracy on the test images is below --target.
"""

from __future__ import annotations

import sys

from data import load
from log import Log
from model import accuracy, loss_with
from recipe import Recipe, parse

import quorate


def main() -> None:
    """Train, evaluate, and say whether the target is reached."""
    options = parse(__doc__)
    recipe = Recipe.of(options)
    train, test = load(options.data)
    log = Log(options.log_every)
    loss = loss_with(recipe.l2)
    trainer = quorate.Trainer(
        recipe.network,
        loss,
        optimizer=quorate.Optimize(
            recipe.optimizer, schedule=recipe.schedule(len(train)), ema_decay=recipe.ema_decay
        ),
        batch_size=recipe.batch_size,
        shards=4,
        seed=recipe.seed,
        run_dir="runs/mnist",
    )
    trainer.fit(train, steps=recipe.updates(len(train)), validation=test, callbacks=[log])
    model, averaged = trainer.model, trainer.averaged_model
    print(recipe.done(len(train)))
    reached = accuracy(averaged or model, test)
    print(f"test accuracy {reached:.4f}, target {options.target}")
    if reached < options.target:
        sys.exit(1)


if __name__ == "__main__":
    main()
