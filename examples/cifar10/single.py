"""LeNet-5 on CIFAR-10. single.py is plain PyTorch on one device, train.py the same with quorate.

    python examples/cifar10/single.py
    python examples/cifar10/train.py                                  # every device
    quorate run --devices cpu --workers 1 examples/cifar10/train.py   # one CPU worker
    quorate run --devices cuda:0,cuda:1 examples/cifar10/train.py     # two GPUs

Both end with exit code 1 if the accuracy on the test images, with the averaged weights, is below
--target.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from data import distorted, load
from model import BATCH_SIZE, EMA_DECAY, LeNet5, accuracy, adam, decay, loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def main() -> None:
    """Train, evaluate, and say whether the target is reached."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--data", type=Path, help="a folder with CIFAR-10's binary version")
    parser.add_argument("--target", type=float, default=0.72, help="least test accuracy")
    options = parser.parse_args()

    train, test = load(options.data)
    torch.manual_seed(0)
    model = LeNet5()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(EMA_DECAY))
    optimizer = adam(model.parameters())
    schedule = decay(optimizer)
    for epoch in range(options.epochs):
        for batch in distorted(train, BATCH_SIZE, epoch):
            optimizer.zero_grad()
            loss(model, batch)["loss"].backward()
            optimizer.step()
            schedule.step()
            averaged.update_parameters(model)
        print(f"epoch {epoch + 1}: test accuracy {accuracy(averaged, test):.4f}", flush=True)
    reached = accuracy(averaged, test)
    print(f"test accuracy {reached:.4f}, target {options.target}")
    print(f"with the plain weights {accuracy(model, test):.4f}")
    if reached < options.target:
        sys.exit(1)


if __name__ == "__main__":
    main()
