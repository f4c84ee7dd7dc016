"""Two products on two devices, their sum on the CPU, and a table of what ran where.

    python examples/placement.py                            # the GPUs there are, else the CPU
    python examples/placement.py --devices cuda:0,cuda:1

With TensorFlow 1 this was ``with tf.device("/gpu:2")`` around each product, ``/cpu:0`` around
``tf.add_n``, and ``tf.ConfigProto(log_device_placement=True)``. In torch an operator runs where its
arguments are. A training shows the same table: ``quorate run --log-placement train.py``.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from quorate.devices import worker_devices
from quorate.placement_log import PlacementLog


class Product(nn.Module):
    """A (2, 3) matrix times a (3, 2) matrix, on one device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def forward(self) -> torch.Tensor:
        numbers = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], device=self.device)
        return numbers.view(2, 3) @ numbers.view(3, 2)


class Sum(nn.Module):
    """The sum of products, on the CPU."""

    def __init__(self, *products: Product) -> None:
        super().__init__()
        self.products = nn.ModuleList(products)

    def forward(self) -> torch.Tensor:
        return torch.stack([product().cpu() for product in self.products]).sum(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", help="two of torch's names, with a comma between them")
    options = parser.parse_args()
    groups = worker_devices(options.devices, 2)
    model = Sum(*(Product(device) for group in groups for device in group))
    with PlacementLog(model) as log:
        total = model()
    print(total)
    print(log.table())
    assert total.tolist() == [[44.0, 56.0], [98.0, 128.0]]


if __name__ == "__main__":
    main()
