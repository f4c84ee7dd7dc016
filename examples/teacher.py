"""A mean teacher on Fashion-MNIST: 600 of 12,000 images have a label, the others say what is alike.

    python examples/teacher.py                                   # every device
    quorate run --devices cpu --workers 2 examples/teacher.py    # two CPU workers: the same bits

The teacher has the average of the student's weights over the updates so far. The student learns
the labels, and to see in an image with noise what the teacher sees without (Tarvainen & Valpola,
2017); how much that counts grows over the run. It ends with exit code 1 if the teacher's accuracy
on the test images is below --target.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from open_data import fashion_mnist
from torch import nn
from torch.utils.data import TensorDataset

import quorate

ROWS, LABELLED, NONE = 12_000, 600, -1


def net() -> nn.Module:
    """28x28 grey images to ten logits."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 10)),
    )


teacher = net()
mean = quorate.Shared("mean", teacher=teacher)  # of the script; mean.teacher is what shards call


def loss(model: nn.Module, batch: list[torch.Tensor], at: Any) -> dict[str, torch.Tensor]:
    """Cross entropy where there is a label, and what the teacher sees; means over all rows."""
    images, labels = batch[0] / 255 - 0.5, batch[1].long()
    noisy = images + 0.3 * torch.randn_like(images) if at.training else images
    student, wanted = model(noisy), mean.teacher(images)
    alike = (student.softmax(1) - wanted.softmax(1)).square().sum(1).mean()
    known = F.cross_entropy(student, labels, ignore_index=NONE, reduction="sum") / len(labels)
    return {
        "loss": known + min(1.0, 2 * at.progress) * alike,
        "student": (student.argmax(1) == labels).float().mean(),
        "teacher": (wanted.argmax(1) == labels).float().mean(),
    }


class Average(quorate.Callback):
    """Moves the teacher after each update."""

    def started(self, run: Any) -> None:
        self.student = run.model

    def updated(self, report: quorate.Report) -> None:
        decay = min(0.99, 1 - 1 / report.global_step)
        with torch.no_grad():
            for its, new in zip(teacher.parameters(), self.student.parameters(), strict=True):
                its.lerp_(new.to(its.device), 1 - decay)


def main() -> None:
    """Train, evaluate, and say how well both do."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--data", type=Path, help="a folder with the four IDX files")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/teacher"))
    parser.add_argument("--target", type=float, default=0.74, help="least test accuracy")
    options = parser.parse_args()

    train, test = fashion_mnist.load(options.data)
    images, labels = (tensor[:ROWS] for tensor in train.tensors)
    labels = labels.long().clone()
    labels[LABELLED:] = NONE
    trainer = quorate.Trainer(
        net,
        loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=2e-3),
        batch_size=100,
        shards=4,
        run_dir=options.run_dir,
    )
    trainer.fit(
        TensorDataset(images, labels), epochs=options.epochs, callbacks=[Average()], validation=test
    )
    found = trainer.evaluate(test)
    print(f"test accuracy: student {found['student']:.4f}, teacher {found['teacher']:.4f}")
    sys.exit(found["teacher"] < options.target)


if __name__ == "__main__":
    main()
