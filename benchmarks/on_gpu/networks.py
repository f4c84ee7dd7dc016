"""Networks that are trained, with made-up rows, a loss function and an optimizer each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from seed_network import Net, data, sgd
from torch import nn
from torch_workloads import classified, workload

from on_gpu.gpt import GPT, TINY, Shape


class Network(NamedTuple):
    """What is trained."""

    model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], dict[str, torch.Tensor]]
    optimizer: Callable[..., torch.optim.Optimizer]
    tensors: tuple[torch.Tensor, ...]
    rows: int  # of a device and update


ROWS = {"seed": 256, "lenet5": 256, "unet": 32, "gpt": 8}
QUICK_ROWS, QUICK_DATA = 4, 64
GPT_DATA = 512  # rows


def network(name: str, *, is_quick: bool) -> Network:
    """Return a network.

    Args:
        name: of ``ROWS``.
        is_quick: whether few rows, and a tiny GPT, do.
    """
    rows = QUICK_ROWS if is_quick else ROWS[name]
    found: Network
    if name == "seed":
        found = Network(Net, classified, sgd, data(), rows)
    elif name == "gpt":
        shape = TINY if is_quick else Shape()
        generator = torch.Generator().manual_seed(0)
        size = (GPT_DATA, shape.tokens + 1)
        tokens = torch.randint(shape.vocabulary, size, generator=generator)
        adamw = partial(torch.optim.AdamW, lr=3e-4, weight_decay=0.1)
        found = Network(lambda: GPT(shape), next_token, adamw, (tokens,), rows)
    else:
        work = workload(name)
        loss = per_pixel if name == "unet" else work.loss
        found = Network(work.model, loss, work.optimizer, work.tensors, rows)
    if is_quick:
        found = found._replace(tensors=tuple(tensor[:QUICK_DATA] for tensor in found.tensors))
    return found


def next_token(model: Any, batch: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cross entropy of each token after the first."""
    (tokens,) = batch  # (B, T + 1) int64
    logits = model(tokens[:, :-1])
    return {"loss": F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())}


def per_pixel(model: Any, batch: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cross entropy of each pixel.

    As rows: torch has no deterministic kernel for a cross entropy of images on NVIDIA GPUs.
    """
    images, classes = batch  # (B, 1, H, W) and (B, H, W), uint8
    logits = model(images).movedim(1, -1).flatten(0, -2)
    return {"loss": F.cross_entropy(logits, classes.long().flatten())}
