"""Optimizers of the configurations: name -> function from parameters to a torch optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import quorate

Parameters = list[nn.Parameter]


def adamw(parameters: Parameters) -> torch.optim.Optimizer:
    """Return AdamW with two groups: matrices decay, vectors learn faster and do not."""
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0, "lr": 2e-2},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)


OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    "adamw": adamw,
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=5e-3, momentum=0.5),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=5e-2),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
}

# Several optimizers in each update; not drawn for random configurations.
LISTS: dict[str, list[Any]] = {
    "several": [
        ("*last", lambda named_parameters: torch.optim.SGD(named_parameters, 0.1, 0.9), None, 0.2),
        (lambda _, p: p.ndim == 2, lambda parameters: torch.optim.Muon(parameters, lr=0.02)),
        ("*", adamw, lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)),
    ]
}

# Further parts of an update: keywords of ``Optimize``.
UPDATE_OPTIONS: dict[str, dict[str, Any]] = {
    "ema": {"ema_decay": 0.9},
    "clip": {"clip_norm": 0.5},
    "schedule": {
        "schedule": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    },
}


def make_optimize(
    name: str, options: tuple[str, ...], phases: tuple[str, ...]
) -> quorate.Optimize | dict[str, quorate.Optimize]:
    """Return the argument for ``Trainer(optimizer=)``.

    Args:
        name: of an optimizer.
        options: some of ``UPDATE_OPTIONS``; other words are ignored.
        phases: each gets a separate optimizer; none: the model has a single optimizer.
    """
    keywords: dict[str, Any] = {}
    for option in options:
        keywords |= UPDATE_OPTIONS.get(option, {})
    one = quorate.Optimize(LISTS.get(name) or OPTIMIZERS[name], **keywords)
    return dict.fromkeys(phases, one) if phases else one
