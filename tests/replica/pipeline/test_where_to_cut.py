"""Possible cuts of a model, and everything left unchanged by a cut."""

import copy

import pytest
import torch
from scripts import everything
from support.messages import expect_error
from support.staged_models import Sized, layer
from torch import nn

from quorate.errors import CutError
from quorate.replica.pipeline.cut import candidates, cut


def test_a_cut_changes_nothing() -> None:
    model, rows = Sized(), torch.randn(3, 8)
    with torch.no_grad():
        model.offset.add_(3)
    before = copy.deepcopy(model.state_dict()), torch.get_rng_state(), dict(vars(model))
    patched = nn.Module.__call__, nn.Module.__getattr__, len, isinstance, torch.zeros
    cut(model, ["b"], (rows,))
    with pytest.raises(CutError):
        cut(model, ["b.nothing"], (rows,))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[0][name])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert vars(model) == before[2]
    assert patched == (nn.Module.__call__, nn.Module.__getattr__, len, isinstance, torch.zeros)


def test_where_a_model_may_be_cut() -> None:
    batch = torch.randn(3, 1, 8, 8), torch.randint(1, 30, (3, 12))
    expected = ("norm", "embedding", "lstm", "dropout", "classes", "words")
    assert candidates(everything.Everything(), batch) == expected
    for name in expected:
        assert len(cut(everything.Everything(), [name], batch)) == 2
    model = nn.Sequential(layer(), layer())
    assert candidates(model, (torch.randn(3, 6),)) == ("1",)
    with expect_error(CutError, name="split"):
        cut(model, ["1", "1.0"], (torch.randn(3, 6),))
