"""What stages would not do as the model does: refused at the cut, or found out in a shard."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from support.cut_compared import same_bits
from support.cut_models import Nests, Told, rows
from support.messages import expect_error
from torch import nn

from quorate.errors import CutError
from quorate.replica.pipeline.cut import cut


def branches(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x


def loops(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for row in range(x.shape[0]):
        x = x + row
    return x


def test_a_shard_that_goes_another_way_is_found_out() -> None:
    with torch.no_grad():
        model = Told(branches)
        model.a.weight.copy_(torch.eye(6))
        model.a.bias.zero_()
    first, _ = cut(model, ["b"], (torch.ones(3, 6),))
    first.run({"x": torch.ones(5, 6)})
    with expect_error(CutError, name="split"):
        first.run({"x": -torch.ones(5, 6)})
    first, _ = cut(Told(loops), ["b"], (rows(3, 6),))
    with expect_error(CutError, name="split"):
        first.run({"x": rows(5, 6)})
    first, _ = cut(Told(lambda m, x: x * m.calls), ["b"], (rows(3, 6),))
    first.run({"x": rows(5, 6)})
    first, _ = cut(Nests(), ["last"], ({"x": rows(2, 6)}, [rows(2, 6)]))
    with expect_error(CutError, name="split"):
        first.run({"batch": {"x": rows(2, 6)}, "more": ([rows(2, 6)],), "mask": rows(2)})


def test_an_attribute_that_changes_is_found_out() -> None:
    model = Told(lambda m, x: x * m.calls)
    first, _ = cut(model, ["b"], (rows(3, 6),))
    model.calls = 2
    with expect_error(CutError, name="split"):
        first.run({"x": rows(5, 6)})


def sets(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.calls += 1
    return x


def raises(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    raise ValueError("not so")


def closes_over(module: Any, x: torch.Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint(lambda y: y + x, x.sin(), use_reentrant=False)


def lowered(module: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return module.a(x).float()


@pytest.mark.parametrize(
    "does",
    [
        sets,
        raises,
        lambda _, x: x * random.random(),
        lambda _, x: x * np.random.rand(),
        lowered,
        closes_over,
    ],
)
def test_what_stages_would_not_do_is_refused(does: Any) -> None:
    model = Told(does)
    with expect_error(CutError, name="split"):
        cut(model, ["b"], (rows(3, 6),))
    assert model.calls == 0
    assert model.training


def test_what_other_threads_draw_is_theirs() -> None:
    def draws(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: (random.random(), np.random.rand()))
        thread.start()
        thread.join()
        return x

    assert len(cut(Told(draws), ["b"], (rows(3, 6),))) == 2


class WritesEarlier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = self.a(x).sin()
        y = self.b(x)
        early.mul_(2)
        return self.c(y) + early


def test_a_value_that_one_stage_writes_and_another_one_reads() -> None:
    same_bits(WritesEarlier(), ["b"], rows(3, 6))
    with expect_error(CutError, name="split"):
        cut(WritesEarlier(), ["b", "c"], (rows(3, 6),))
    norm = nn.BatchNorm1d(6)
    model = nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 6), norm)
    with expect_error(CutError, name="split"):
        cut(model, ["2"], (rows(3, 6),))
