"""Digits, as TFRecord files. single.py is plain PyTorch on one device, train.py has quorate.

    python examples/mnist/single.py
    python examples/mnist/train.py                                  # every device
    quorate run --devices cpu --workers 1 examples/mnist/train.py   # one CPU worker
    quorate run --devices cuda:0,cuda:1 examples/mnist/train.py     # two GPUs

Both end with exit code 1 if the accuracy on the test images is below --target.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from data import load
from log import Log
from model import BATCH_SIZE, Net, accuracy, falling, loss, nesterov

import quorate


def main() -> None:
    """Train, evaluate, and say whether the target is reached."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-epochs", type=int, default=4)
    parser.add_argument("--data", type=Path, help="a folder with the two TFRecord files")
    parser.add_argument("--target", type=float, default=0.99, help="least test accuracy")
    parser.add_argument("--log-every", type=int, default=100, help="updates per line of the log")
    options = parser.parse_args()

    train, test = load(options.data)
    log = Log(options.log_every)
    decay = falling(options.num_epochs * math.ceil(len(train) / BATCH_SIZE))
    trainer = quorate.Trainer(
        Net,
        loss,
        optimizer=quorate.Optimize(nesterov, schedule=decay),
        batch_size=BATCH_SIZE,
        shards=4,
        run_dir="runs/mnist",
    )
    trainer.fit(train, epochs=options.num_epochs, validation=test, callbacks=[log])
    model = trainer.model
    print(f"Done training for {options.num_epochs} epochs, {log.steps:,} steps.")
    reached = accuracy(model, test)
    print(f"test accuracy {reached:.4f}, target {options.target}")
    if reached < options.target:
        sys.exit(1)


if __name__ == "__main__":
    main()
