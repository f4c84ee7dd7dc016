"""Where a model may be cut, and what a cut leaves as it was."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from scripts import everything
from support.cut_models import Sized, Told, layer, rows
from support.messages import expect_error
from torch import nn

from quorate.errors import CutError
from quorate.replica.pipeline.cut import candidates, cut


def test_a_cut_changes_nothing() -> None:
    model = Sized()
    with torch.no_grad():
        model.offset.add_(3)
    before = copy.deepcopy(model.state_dict()), torch.get_rng_state(), dict(vars(model))
    patched = nn.Module.__call__, nn.Module.__getattr__, len, isinstance, torch.zeros
    cut(model, ["b"], (rows(3, 6),))
    with pytest.raises(CutError):
        cut(model, ["b.nothing"], (rows(3, 6),))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[0][name])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert vars(model) == before[2]
    assert patched == (nn.Module.__call__, nn.Module.__getattr__, len, isinstance, torch.zeros)


def test_nothing_of_the_example_is_kept() -> None:
    kept = []

    def notes(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        kept.append(weakref.ref(_quorate_value(y)))
        return y

    def _quorate_value(recorded: Any) -> torch.Tensor:
        return object.__getattribute__(recorded, "_quorate_value")

    stages = cut(Told(notes), ["b"], (rows(3, 6),))
    gc.collect()
    assert len(stages) == 2
    assert kept[0]() is None


@pytest.mark.parametrize(
    "split",
    [
        ["convolutoin"],
        ["zzz"],
        ["unused"],
        ["lstm", "lstm"],
        ["convolution"],
    ],
)
def test_wrong_cuts(split: list[str]) -> None:
    batch = rows(3, 1, 8, 8), torch.randint(1, 30, (3, 12))
    with expect_error(CutError, name="split"):
        cut(everything.Everything(), split, batch)


def test_where_a_model_may_be_cut() -> None:
    batch = rows(3, 1, 8, 8), torch.randint(1, 30, (3, 12))
    expected = ("norm", "embedding", "lstm", "dropout", "classes", "words")
    assert candidates(everything.Everything(), batch) == expected
    for name in expected:
        assert len(cut(everything.Everything(), [name], batch)) == 2
    model = nn.Sequential(layer(), layer())
    assert candidates(model, (rows(3, 6),)) == ("1",)
    with expect_error(CutError, name="split"):
        cut(model, ["1", "1.0"], (rows(3, 6),))
