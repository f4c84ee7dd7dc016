"""Digits, as TFRecord files. single.py is plain PyTorch on one device, train.py has quorate.

    python examples/mnist/single.py
    python examples/mnist/train.py                                  # every device
    quorate run --devices cpu --workers 1 examples/mnist/train.py   # one CPU worker
    quorate run --devices cuda:0,cuda:1 examples/mnist/train.py     # two GPUs

Both end with exit code 1 if the accuracy on the test images is below --target.
"""

from __future__ import annotations

import sys
from itertools import islice

import torch
from data import load
from log import Log
from model import accuracy, loss_with
from recipe import Recipe, endless, parse
from torch.utils.data import DataLoader


def main() -> None:
    """Train, evaluate, and say whether the target is reached."""
    options = parse(__doc__, threads=True)
    recipe = Recipe.of(options)
    train, test = load(options.data)
    log = Log(options.log_every)
    torch.manual_seed(recipe.seed)
    loss = loss_with(recipe.l2)
    model = recipe.network()
    averaged = recipe.averaged(model)
    optimizer = recipe.optimizer(model.parameters())
    schedule = recipe.schedule(len(train))(optimizer)
    batches = endless(DataLoader(train, recipe.batch_size, shuffle=True))
    for batch in islice(batches, recipe.updates(len(train))):
        mean = loss(model, batch)["loss"]
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        schedule.step()
        if averaged is not None:
            averaged.update_parameters(model)
        log.step(mean.item(), len(batch[0]))
    print(recipe.done(len(train)))
    reached = accuracy(averaged or model, test)
    print(f"test accuracy {reached:.4f}, target {options.target}")
    if reached < options.target:
        sys.exit(1)


if __name__ == "__main__":
    main()
