"""What is minimised, and what is measured.

Legend: B tiles, K classes, L levels that are tested, H rows, W columns of pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from legend import IGNORED, Legend
from torch import nn


def loss_with(
    weights: Sequence[float], tested: int = 1
) -> Callable[[nn.Module, Any], dict[str, Any]]:
    """Cross entropy, in which a pixel of class k counts weights[k], and an ignored one nothing.

    The mean is over weights and not over tiles, so "weight" is their sum: that makes it exact over
    shards, however many pixels each ignores.

    Args:
        weights: of the K classes.
        tested: L, in how many sizes the test set has images.
    """

    def loss(model: nn.Module, batch: Sequence[torch.Tensor]) -> dict[str, Any]:
        images, classes, levels = batch  # (B, C, H, W) uint8, (B, H, W) uint8, (B,) int64
        classes = classes.long()
        each = torch.tensor(weights, device=images.device)
        logits = model(images)
        found: dict[str, Any] = {
            "loss": F.cross_entropy(logits, classes, each, ignore_index=IGNORED),
            "weight": each[classes[classes != IGNORED]].sum(dtype=torch.float64),
        }
        if not model.training:
            found["confusion"] = confusion(
                logits.argmax(1), classes, levels, (tested, len(weights))
            )
        return found

    return loss


def confusion(
    guesses: torch.Tensor, classes: torch.Tensor, levels: torch.Tensor, shape: tuple[int, int]
) -> torch.Tensor:
    """Pixels by level, true class and guessed class: (L, K, K) int64.

    Args:
        guesses: (B, H, W) int64.
        classes: (B, H, W) int64; ``IGNORED`` is not counted.
        levels: (B,) int64.
        shape: L and K.
    """
    tested, k = shape
    cells = (levels.view(-1, 1, 1) * k + classes) * k + guesses
    return torch.bincount(cells[classes != IGNORED], minlength=tested * k * k).view(tested, k, k)


def iou(total: torch.Tensor, legend: Legend) -> dict[str, float]:
    """Intersection over union, per class and in the mean, over all pixels of a test set.

    Args:
        total: (L, K, K) int64.
        legend: of the K classes.

    Returns:
        "mean_iou", and "water_iou" and so on, of all levels together; where there are several,
        "mean_iou_0" and so on of level 0. It is no number for a class that is neither there nor
        guessed. The mean is over the classes that are there.
    """
    found = {}
    levels = total if len(total) > 1 else ()
    for suffix, matrix in (("", total.sum(0)), *((f"_{k}", each) for k, each in enumerate(levels))):
        both = matrix.diagonal().double()
        true = matrix.sum(1)
        each = both / (matrix.sum(0) + true - both)
        mean = each[true > 0].mean()
        for name, value in zip(("mean", *legend.metrics), (mean, *each), strict=True):
            found[f"{name}_iou{suffix}"] = float(value)
    return found
