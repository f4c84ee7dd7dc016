"""A script with linear layers large enough for oneDNN, on a processor said to be fast by oneDNN.

    quorate run --devices cpu --kernels measured tests/scripts/kernels.py RUN [TIMES [STEPS]]

The measured ratio is replaced by 2.4, or TIMES: the test machine may be of either kind.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.replica.kernels import measured

# Rows of a shard, and a width with different orders of addition by oneDNN and MKL: over 384 inputs
# a processor was seen to have the same bits by both.
ROWS, WIDTH = 32, 768  # 19 million multiply-adds in a layer


def net() -> nn.Module:
    """Return two layers for oneDNN, one layer too small for it, and dropout between them."""
    torch.manual_seed(0)
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(first, nn.ReLU(), nn.Dropout(0.1), second, nn.ReLU(), nn.Linear(WIDTH, 10))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


if __name__ == "__main__":
    times = float(sys.argv[2]) if len(sys.argv) > 2 else 2.4
    measured.how_much_faster = lambda: times
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(4 * ROWS, WIDTH, generator=generator),
        torch.randint(0, 10, (4 * ROWS,), generator=generator),
    )
    trainer = quorate.Trainer(
        net(), loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch_size=2 * ROWS, shards=2,
        run_dir=Path(sys.argv[1]),
    )  # fmt: skip
    trainer.fit(data, steps=int(sys.argv[3]) if len(sys.argv) > 3 else 4)
