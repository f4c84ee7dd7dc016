"""A script with a mistake, named by Python's arguments, for tests of messages.

broken.py trainer|fit SETTING VALUE: a setting. broken.py loss VALUE: the result of the loss, with
``out`` of the model and ``elsewhere``, another model. broken.py fine: none.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import front_door
from support.fits import sgd

place, *words = sys.argv[1:]
elsewhere = nn.Linear(3, 1)


def loss(model: nn.Module, batch: list[torch.Tensor]) -> object:
    out = model(batch[0])
    return eval(words[0]) if place == "loss" else out.mean()


settings: dict[str, object] = {"optimizer": sgd, "batch_size": 8, "shards": 2}
arguments: dict[str, object] = {"epochs": 1, "dataset": TensorDataset(torch.ones(20, 3))}
if place in ("trainer", "fit"):
    (settings if place == "trainer" else arguments)[words[0]] = eval(words[1])
trainer = front_door.trainer(nn.Linear(3, 1), settings.pop("loss", loss), **settings)
trainer.fit(arguments.pop("dataset"), **arguments)
