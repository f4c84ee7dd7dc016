"""A loop of plain torch: the results of a training without shards, workers and resumes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def plain_loop(
    model: nn.Module,
    make: Make,
    loss: Callable[..., Any],
    data: TensorDataset,
    *,
    steps: int,
    batch_size: int = 12,
    clip_norm: float | None = None,
    is_closure: bool = False,
    adapt: Callable[[], object] = lambda: None,
    updated: Callable[[int, float], object] = lambda _step, _loss: None,
) -> torch.optim.Optimizer:
    """Train a model on rows in their order; return the optimizer.

    Args:
        make: makes the optimizer of the trainable parameters.
        clip_norm: of ``clip_grad_norm_``.
        is_closure: whether ``step`` gets a function for loss and gradient.
        adapt: called before ``step``: may change gradients.
        updated: called after each update with the number of updates and the loss before it.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = make(parameters)
    if hasattr(optimizer, "train"):  # schedule-free optimizers
        optimizer.train()
    starts = range(0, len(data), batch_size)
    for step in range(steps):
        start = starts[step % len(starts)]
        rows = [*data[start : start + batch_size]]

        def closure(rows: list[torch.Tensor] = rows) -> torch.Tensor:
            optimizer.zero_grad()
            value: torch.Tensor = loss(model, rows)
            value.backward()
            return value

        value = closure().item()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, clip_norm)
        adapt()
        optimizer.step(closure) if is_closure else optimizer.step()  # type: ignore[call-overload]
        updated(step + 1, value)
    return optimizer


def assert_close(mine: nn.Module, theirs: nn.Module, tolerance: float = 1e-9) -> None:
    """Compare all entries of two state dicts, float32 with 2e-6 at least."""
    expected = theirs.state_dict()
    assert mine.state_dict().keys() == expected.keys()
    for name, value in mine.state_dict().items():
        most = max(tolerance, 1e-14 if value.dtype in (torch.float64, torch.complex128) else 2e-6)
        torch.testing.assert_close(value, expected[name], rtol=most, atol=most, msg=name)
