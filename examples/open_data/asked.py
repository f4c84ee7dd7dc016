"""What examples on Fashion-MNIST are asked at the command line: for how long, where, how good."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from open_data import fashion_mnist
from torch.utils.data import TensorDataset


@dataclass(frozen=True)
class Asked:
    """The data, and what the options say.

    Args:
        train: images, uint8 (60000, 1, 28, 28), and labels, int64 (60000,).
        test: likewise, 10,000.
        epochs: to train for.
        run_dir: where state and metrics are saved.
        target: what has to be reached, or the exit code is 1.
    """

    train: TensorDataset
    test: TensorDataset
    epochs: int
    run_dir: Path
    target: float


def asked(about: str, *, epochs: int, target: float, reached: str) -> Asked:
    """Read the command line and load the data.

    Args:
        about: the example's docstring; its file's name is that of the run directory.
        epochs: without ``--epochs``.
        target: without ``--target``.
        reached: what ``--target`` is, for ``--help``.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--data", type=Path, help="a folder with the four IDX files")
    parser.add_argument("--run-dir", type=Path, default=Path("runs") / Path(parser.prog).stem)
    parser.add_argument("--target", type=float, default=target, help=reached)
    options = parser.parse_args()
    train, test = fashion_mnist.load(options.data)
    return Asked(train, test, options.epochs, options.run_dir, options.target)
