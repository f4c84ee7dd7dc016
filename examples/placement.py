"""Two products on two devices, their sum on the CPU, and a table of what ran where.

    python examples/placement.py                            # the first two GPUs, else the CPU
    python examples/placement.py --devices cuda:2,cuda:3

With TensorFlow 1 this was ``with tf.device("/gpu:2")`` around each product, ``/cpu:0`` around
``tf.add_n``, and ``tf.ConfigProto(log_device_placement=True)``. In torch an operator runs where its
arguments are, so the model says once where its parts lie. Here the left factors are trained, until
the sum of the products is that of the tutorial, [[44, 56], [98, 128]].
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.machine.devices import worker_devices

NUMBERS = torch.arange(1.0, 7.0)
SUM = torch.tensor([[44.0, 56.0], [98.0, 128.0]])


class Product(nn.Module):
    """A (2, 3) matrix on one device, times a batch of (3, 2) matrices."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.zeros(2, 3, device=device))

    def forward(self, matrices: torch.Tensor) -> torch.Tensor:
        return self.factor @ matrices.to(self.factor.device)


class Sum(nn.Module):
    """The sum of products, on the CPU."""

    def __init__(self, devices: list[torch.device]) -> None:
        super().__init__()
        self.products = nn.ModuleList(Product(device) for device in devices)

    def forward(self, matrices: torch.Tensor) -> torch.Tensor:
        return torch.stack([product(matrices).cpu() for product in self.products]).sum(0)


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """How far the sums are from what they should be."""
    matrices, sums = batch
    return (model(matrices) - sums.cpu()).square().mean()


def main() -> None:
    """Train, and show the tutorial's sum."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", help="two of torch's names, with a comma between them")
    options = parser.parse_args()
    gpus = torch.cuda.device_count() > 1
    names = options.devices or ("cuda:0,cuda:1" if gpus else "cpu,cpu")
    # As ``devices=`` reads names (TensorFlow's too): a device that does not exist is refused.
    devices = [device for group in worker_devices(names, workers=None) for device in group]

    matrices = torch.randn(480, 3, 2, generator=torch.Generator().manual_seed(0))
    trainer = quorate.Trainer(
        Sum(devices),
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.4),
        batch_size=24,
        shards=2,
        devices="+".join(dict.fromkeys(map(str, devices))),
        compute=quorate.Compute(log_placement=True),
    )
    trainer.fit(TensorDataset(matrices, 2 * NUMBERS.view(2, 3) @ matrices))
    found = trainer.model(NUMBERS.view(3, 2)).detach()
    print(found)
    torch.testing.assert_close(found, SUM)


if __name__ == "__main__":
    main()
