"""A mean teacher on Fashion-MNIST: 600 of 12,000 images have a label, the others say what is alike.

    python examples/teacher.py                                   # every device
    quorate run --devices cpu --workers 2 examples/teacher.py    # two CPU workers: the same bits

The teacher has the average of the student's weights. The student learns the labels, and to see in
an image with noise what the teacher sees without, which counts more and more (Tarvainen & Valpola,
2017). It ends with exit code 1 if the teacher's accuracy on the test images is below --target.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from open_data.asked import asked
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import quorate


def net() -> nn.Module:  # images (B, 1, 28, 28) to logits (B, 10)
    first = nn.Conv2d(1, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(32 * 7 * 7, 10))


teacher = net()
mean = quorate.Shared("mean", teacher=teacher)  # mean.teacher is what shards call, on any worker


def loss(model: nn.Module, batch: list[Tensor], at: Any) -> dict[str, Tensor]:
    images, labels = batch[0] / 255 - 0.5, batch[1].long()
    noisy = images + 0.3 * torch.randn_like(images) if at.training else images
    student, wanted = model(noisy), mean.teacher(images)
    alike = (student.softmax(1) - wanted.softmax(1)).square().sum(1).mean()
    known = F.cross_entropy(student, labels, reduction="sum") / len(labels)
    right = [(logits.argmax(1) == labels).float().mean() for logits in (student, wanted)]
    total = known + min(1.0, 2 * at.progress) * alike
    return {"loss": total, "student": right[0], "teacher": right[1]}


class Average(quorate.Callback):
    def started(self, run: quorate.Trainer) -> None:
        self.student = run.model

    @torch.no_grad()
    def updated(self, report: quorate.Report) -> None:
        decay = min(0.99, 1 - 1 / report.global_step)
        for its, new in zip(teacher.parameters(), self.student.parameters(), strict=True):
            its.lerp_(new.to(its.device), 1 - decay)


if __name__ == "__main__":
    its = asked(__doc__, epochs=10, target=0.74, reached="least accuracy of the teacher")
    images, labels = its.train.tensors[0][:12_000], its.train.tensors[1][:12_000].long().clone()
    labels[600:] = -100  # which cross entropy leaves out
    adam = partial(torch.optim.Adam, lr=2e-3)
    trainer = quorate.Trainer(
        net, loss, optimizer=adam, batch_size=100, shards=4, run_dir=its.run_dir
    )
    rows = TensorDataset(images, labels)
    trainer.fit(rows, epochs=its.epochs, callbacks=[Average()], validation=its.test)
    found = trainer.evaluate(its.test)
    print(f"test accuracy: student {found['student']:.4f}, teacher {found['teacher']:.4f}")
    raise SystemExit(found["teacher"] < its.target)
