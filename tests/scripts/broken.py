"""A script with one mistake, named by its argument, for the tests of error messages.

broken.py NAME
broken.py trainer|fit SETTING VALUE  with the value as Python has it
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import front_door

mistake = sys.argv[1]


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self):
        yield torch.zeros(2)


def loss(model: nn.Module, batch: list[torch.Tensor]) -> object:
    out = model(batch[0])
    match mistake:
        case "vector-loss":
            return {"loss": out}
        case "no-gradient":
            return {"loss": out.mean().detach()}
        case "none":
            return None
        case "float-loss":
            return {"loss": 0.5}
        case "no-loss":
            return {"accuracy": out.mean()}
        case "negative-weight":
            return {"loss": out.mean(), "weight": -1}
        case "zero-weight":
            return {"loss": out.mean(), "weight": 0}
        case "vector-metric":
            return {"loss": out.mean(), "accuracy": out}
        case "text-metric":
            return {"loss": out.mean(), "accuracy": "high"}
        case "other-model":
            return {"loss": elsewhere(batch[0]).mean()}
        case "user-error":
            return out.reshape(7, 7, 7)
    return out.mean()


elsewhere = nn.Linear(3, 1)
data: object = TensorDataset(torch.ones(20, 3))
if mistake == "empty":
    data = TensorDataset(torch.ones(0, 3))
if mistake == "iterable":
    data = Endless()
if mistake == "no-dataset":
    data = 5
options: dict[str, object] = {"batch_size": 8, "shards": 2}
options |= {
    "batch-size-0": {"batch_size": 0},
    "batch-size-float": {"batch_size": 8.0},
    "batch-size-true": {"batch_size": True},
    "clip-0": {"clip_norm": 0},
    "ema-1": {"ema_decay": 1.0},
    "plateau": {"schedule": torch.optim.lr_scheduler.ReduceLROnPlateau},
    "optimizer": {"optimizer": lambda params: None},
    "optimizer-itself": {"optimizer": torch.optim.SGD(elsewhere.parameters())},
    "schedule-itself": {"schedule": 5},
    "other-schedule": {
        "schedule": lambda opt: torch.optim.lr_scheduler.ConstantLR(
            torch.optim.SGD(elsewhere.parameters())
        )
    },
    "run-dir-file": {"run_dir": __file__},
    "run-dir-number": {"run_dir": 5},
    "rule": {"update": "majority"},
    "big-batch": {"batch_size": 64},
}.get(mistake, {})
arguments: dict[str, object] = {"epochs": 0 if mistake == "epochs-0" else 1}
if mistake == "trainer":
    options |= {"batch_size": 8} | {sys.argv[2]: eval(sys.argv[3])}
if mistake == "fit":
    arguments[sys.argv[2]] = eval(sys.argv[3])
options.setdefault("optimizer", lambda params: torch.optim.SGD(params, lr=0.1))
trainer = front_door.trainer(nn.Linear(3, 1), None if mistake == "no-function" else loss, **options)
trainer.fit(data, **arguments)
