"""The workloads in PyTorch: the examples' networks and optimizers, over the same arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from arrays import CLASSES, PAD, PER_WORKER, VOCABULARY, arrays, order
from protocol import Ranks, Wanted
from torch import nn

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# The folder of each workload's network; every one has a ``model``, and a process needs one.
FOLDERS = {"seed": "mnist", "lenet5": "cifar10", "chatbot": "chatbot", "unet": "segmentation"}

Batch = tuple[torch.Tensor, ...]
Losses = dict[str, torch.Tensor]


class Workload(NamedTuple):
    """What is trained."""

    model: Callable[[], nn.Module]
    loss: Callable[[Any, Batch], Losses]  # with "weight" where the mean is not over rows
    optimizer: Callable[..., torch.optim.Optimizer]
    clip_norm: float | None
    per_worker: int
    tensors: Batch


def workload(name: str) -> Workload:
    """Return a workload."""
    sys.path.insert(0, str(EXAMPLES / FOLDERS[name]))
    import model as found  # of that folder

    networks: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Batch], Losses]]] = {
        "seed": (lambda: found.Net(), classified),
        "lenet5": (lambda: found.LeNet5(), classified),
        "chatbot": (lambda: found.Seq2Seq(VOCABULARY), answered),
        "unet": (lambda: found.UNet(1), segmented),
    }
    optimizers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "seed": partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
        "lenet5": partial(torch.optim.Adam, lr=1e-3),
        "chatbot": partial(torch.optim.Adam, lr=1e-3),
        "unet": partial(torch.optim.AdamW, lr=1e-3, weight_decay=1e-2),
    }
    return Workload(
        *networks[name],
        optimizers[name],
        5.0 if name == "chatbot" else None,
        PER_WORKER[name],
        tuple(torch.from_numpy(array) for array in arrays(name)),
    )


def classified(model: Any, batch: Batch) -> Losses:
    """Cross entropy of images."""
    images, labels = batch
    return {"loss": F.cross_entropy(model(images), labels)}


def answered(model: Any, batch: Batch) -> Losses:
    """Cross entropy per word, as examples/chatbot has it."""
    questions, answers = batch
    wanted = answers[:, 1:]
    real = wanted != PAD
    logits = model.logits(model(questions, answers[:, :-1])[real])
    return {"loss": F.cross_entropy(logits, wanted[real]), "weight": torch.count_nonzero(real)}


def segmented(model: Any, batch: Batch) -> Losses:
    """Cross entropy per pixel; there are none to ignore, and all classes weigh the same."""
    images, classes = batch
    assert int(classes.max()) < CLASSES
    return {"loss": F.cross_entropy(model(images), classes.long())}


class WithLoss(nn.Module):
    """A model whose forward is the loss: what DDP and its like wrap sees all that is computed."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.model = work.model()
        self._loss = work.loss

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        return self._loss(self.model, batch)["loss"]


TUNED = "channels_last, fused optimizer"


def made(wanted: Wanted, work: Workload) -> WithLoss:
    """Return the model, its tensors as channels_last if it is tuned; one thread computes it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = WithLoss(work)
    return module.to(memory_format=torch.channels_last) if wanted.is_tuned else module


def optimizer_of(
    wanted: Wanted, work: Workload, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """Return the workload's optimizer."""
    return work.optimizer(list(parameters), **({"fused": True} if wanted.is_tuned else {}))


def autocast(wanted: Wanted) -> AbstractContextManager[object]:
    """Return the context of a forward pass."""
    return torch.autocast("cpu", torch.bfloat16, enabled=wanted.precision == "bf16")


def step_of(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    work: Workload,
    ranks: Ranks,
    *,
    context: Callable[[], AbstractContextManager[object]],
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward,
) -> Callable[[], None]:
    """Return one step of the loop that people write.

    Args:
        context: of a forward pass.
        backward: from a loss.
    """
    batches = order(len(work.tensors[0]), work.per_worker, ranks.rank, ranks.size)

    def step() -> None:
        rows = torch.from_numpy(next(batches))
        batch = [tensor[rows] for tensor in work.tensors]
        with context():
            value = module(*batch)
        optimizer.zero_grad()
        backward(value)
        if work.clip_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), work.clip_norm)
        optimizer.step()
        value.item()

    return step
