"""LeNet-5 on CIFAR-10. single.py is plain PyTorch on one device, train.py the same with quorate.

    python examples/cifar10/single.py
    python examples/cifar10/train.py                                  # every device
    quorate run --devices cpu --workers 1 examples/cifar10/train.py   # one CPU worker
    quorate run --devices cuda:0,cuda:1 examples/cifar10/train.py     # two GPUs

Both end with exit code 1 if the accuracy on the test images, with the averaged weights, is below
--target.
"""

from __future__ import annotations

import sys

import torch
from data import load
from log import Log
from model import accuracy, loss_with
from recipe import Recipe, parse


def main() -> None:
    """Train, evaluate, and say whether the target is reached."""
    options = parse(__doc__, threads=True)
    recipe = Recipe.of(options)
    train, test = load(options.data)
    log = Log(options.log_every)
    loss = loss_with(recipe.l2)
    torch.manual_seed(recipe.seed)
    model = recipe.network()
    averaged = recipe.averaged(model)
    optimizer = recipe.optimizer(model.parameters())
    schedule = recipe.schedule(optimizer)
    log.say("Session started.")
    for batch in recipe.batches(train):
        found = loss(model, batch)
        optimizer.zero_grad()
        found["loss"].backward()
        optimizer.step()
        schedule.step()
        averaged.update_parameters(model)
        log.step(found["loss"].item(), found["accuracy"].item())
    log.say("Finished training.")
    reached = accuracy(averaged, test)
    print(f"test accuracy {reached:.4f}, target {options.target}")
    print(f"with the plain weights {accuracy(model, test):.4f}")
    if reached < options.target:
        sys.exit(1)


if __name__ == "__main__":
    main()
