"""Phases that cannot be: one line each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.gan import ROWS, Generator, adam, d_loss, dataset, g_loss, sgd, trainer
from support.messages import expect_error
from torch import nn

import quorate
from quorate.errors import LossError, SettingError

REFUSED: list[tuple[str, object, dict[str, Any]]] = [
    ("loss", "no phase", {"loss": {}}),
    ("loss", f"an item {d_loss!r}", {"loss": [d_loss, g_loss]}),
    ("trains of phase 'e'", "e", {"loss": {"d": d_loss, "e": g_loss}, "optimizer": sgd}),
    ("loss", "no phase for g.first.weight", {"loss": {"d": d_loss}, "optimizer": sgd}),
    ("loss", "two phases 'd'", {"loss": [("d", d_loss), ("d", g_loss)], "optimizer": sgd}),
    ("loss", "d.x", {"loss": {"d.x": d_loss}}),
    ("loss 'g'", "int", {"loss": {"d": d_loss, "g": 3}}),
    ("loss 'g'", "<lambda>(model)", {"loss": {"d": d_loss, "g": lambda model: model}}),
    ("optimizer", "d", {"optimizer": {"d": sgd}}),
    ("optimizer", "a dict of d, g", {"loss": g_loss}),
    ("update", "async", {"update": "async"}),
    ("update", "bounded:2", {"update": "bounded:2"}),
    ("servers", 2, {"workers": quorate.Workers(engine="ray", servers=2)}),
    ("model 'd'", "int", {"model": {"g": Generator, "d": 3}}),
    ("model", "an empty dict", {"model": {}}),
    ("model", "keys", {"model": {"keys": Generator}}),
]


@pytest.mark.parametrize(
    ("name", "got", "options"),
    REFUSED,
    ids=[f"{n} {row[0]}" for n, row in enumerate(REFUSED)],
)
def test_refused_in_one_line(name: str, got: object, options: dict[str, Any]) -> None:
    with expect_error(SettingError, name=name, got=got) as raised:
        trainer(**options)
    assert "\n" not in str(raised.value)


def test_refused_when_training_begins() -> None:
    lbfgs = {"d": torch.optim.LBFGS, "g": adam}
    with expect_error(SettingError, name="optimizer", got="LBFGS in phase 'd'"):
        trainer(optimizer=lbfgs).fit(dataset())
    with expect_error(SettingError, name="batch_size", got="58 of 58 rows"):
        trainer(batch_size=ROWS).fit(dataset())

    def of_the_other(model: nn.ModuleDict, batch: list[torch.Tensor]) -> torch.Tensor:
        return model["d"](batch[0]).mean()  # type: ignore[no-any-return]

    with expect_error(LossError, name="loss") as raised:
        trainer({"d": d_loss, "g": of_the_other}).fit(dataset())
    assert "(phase g)" in "".join(raised.value.__notes__)
    heavy = {"d": lambda m, b: {**d_loss(m, b), "weight": 3}, "g": g_loss}
    with expect_error(LossError, name="weight", got="{'d': 3.0} from the phases"):
        trainer(heavy).fit(dataset())
