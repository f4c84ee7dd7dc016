"""Phases that cannot be: one line each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.gan import ROWS, Generator, adam, d_loss, dataset, g_loss, sgd, trainer
from torch import nn

import quorate
from quorate.errors import LossError, SettingError

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"loss": {}}, "loss: got 'no phase'"),
    ({"loss": [d_loss, g_loss]}, "expected a function, a dict from phases"),
    (
        {"loss": {"d": d_loss, "e": g_loss}, "optimizer": sgd},
        "trains of phase 'e': got 'e', expected a part of the",
    ),
    ({"loss": {"d": d_loss}, "optimizer": sgd}, "no phase for g.first.weight"),
    ({"loss": [("d", d_loss), ("d", g_loss)], "optimizer": sgd}, "two phases 'd'"),
    ({"loss": {"d.x": d_loss}}, "a printable text without"),
    ({"loss": {"d": d_loss, "g": 3}}, "loss 'g': got 'int'"),
    ({"loss": {"d": d_loss, "g": lambda model: model}}, "loss 'g'"),
    ({"optimizer": {"d": sgd}}, "optimizer: got 'd', expected one for each phase: d, g"),
    ({"loss": g_loss}, "as there is one loss"),
    ({"update": "async"}, "expected sync or quorum:R, as the loss has phases"),
    ({"update": "bounded:2"}, "expected sync or quorum:R, as the loss has phases"),
    ({"workers": quorate.Workers(engine="ray", servers=2)}, "servers"),
    ({"model": {"g": Generator, "d": 3}}, "model 'd': got 'int'"),
    ({"model": {}}, "model: got 'an empty dict'"),
    ({"model": {"keys": Generator}}, "names as attributes"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_refused_in_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError) as raised:
        trainer(**options)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_refused_when_training_begins() -> None:
    lbfgs = {"d": torch.optim.LBFGS, "g": adam}
    with pytest.raises(SettingError, match="LBFGS in phase 'd'\", expected optimizers that step"):
        trainer(optimizer=lbfgs).fit(dataset())
    with pytest.raises(SettingError, match="expected batches enough for phase 'g'"):
        trainer(batch_size=ROWS).fit(dataset())

    def of_the_other(model: nn.ModuleDict, batch: list[torch.Tensor]) -> torch.Tensor:
        return model["d"](batch[0]).mean()  # type: ignore[no-any-return]

    with pytest.raises(LossError, match="no gradient") as raised:
        trainer({"d": d_loss, "g": of_the_other}).fit(dataset())
    assert "(phase g)" in "".join(raised.value.__notes__)
    heavy = {"d": lambda m, b: {**d_loss(m, b), "weight": 3}, "g": g_loss}
    with pytest.raises(LossError, match="expected the same of each"):
        trainer(heavy).fit(dataset())
