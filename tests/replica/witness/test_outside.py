"""What user code changes between updates of what the loss function names is a doubt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quorate.replica.notes import Notes
from quorate.replica.witness.outside import Outside

COEFFICIENTS = {"beta": 0.0}


def global_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).mean() * COEFFICIENTS["beta"]


@pytest.mark.parametrize("alone", [True, False])
def test_a_changed_dict_is_named_once(alone: bool) -> None:
    model, notes, settings = nn.Linear(1, 1), Notes(), {"gamma": 1.0}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch).mean() * settings["gamma"]

    outside = Outside(model, loss, notes, alone=alone)
    with outside.looking():
        model.weight.data.fill_(2.0)  # carried
    assert notes.doubts == []
    for _ in range(2):
        with outside.looking():
            settings["gamma"] += 1
    (doubt,) = notes.doubts
    assert "'settings' in the closure of the loss function" in doubt


def test_a_change_between_two_looks_is_seen_where_no_shard_is_computed() -> None:
    for alone in (True, False):
        COEFFICIENTS["beta"] = 0.0
        notes = Notes()
        outside = Outside(nn.Linear(1, 1), global_loss, notes, alone=alone)
        with outside.looking():
            pass
        COEFFICIENTS["beta"] = 1.0  # else it may have been the shards of this process
        with outside.looking():
            pass
        assert bool(notes.doubts) is alone
