"""A shard of one row that BatchNorm cannot normalise: said before the first update, with a cure."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.errors import SettingError


def vectors() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(27, 2))


def trainer(net: Any, batch_size: int = 24, shards: int = 4) -> quorate.Trainer:
    return quorate.Trainer(
        net,
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=batch_size,
        shards=shards,
        devices="cpu",
        workers=quorate.Workers(1, engine="towers"),
    )


def data(rows: int, *shape: int) -> TensorDataset:
    x = torch.randn(rows, *shape, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, torch.arange(rows) % 2)


@pytest.mark.parametrize("rows", [97, 101, 103])
def test_it_is_refused_before_the_first_update_with_what_helps(rows: int) -> None:
    with pytest.raises(SettingError) as caught:
        trainer(vectors).fit(data(rows, 4), epochs=1)
    text = str(caught.value)
    assert text.startswith("batch_size: got 24, ")
    assert "'1' (BatchNorm1d)" in text
    for name, value in re.findall(r"(batch_size|shards)=(\d+)", text):
        cured: Any = {name: int(value)}
        trainer(vectors, **cured).fit(data(rows, 4), epochs=1)


@pytest.mark.parametrize(("rows", "steps"), [(104, 5), (101, 4)])
def test_what_no_step_has_is_not_refused(rows: int, steps: int) -> None:
    trainer(vectors).fit(data(rows, 4), steps=steps)


def test_one_image_has_many_values_per_channel() -> None:
    trainer(images).fit(data(101, 1, 4, 4), epochs=1)
