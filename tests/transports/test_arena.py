"""The arena: parameters and results in memory that coordinator and workers share."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest
import torch
from support.messages import expect_error
from torch import nn

from quorate.errors import UserError
from quorate.machine import shared_memory
from quorate.machine.shared_memory import Segment
from quorate.replica.flat import Layout
from quorate.replica.model import bind, trainable
from quorate.transports.processes.arena import Arena


def shared_model() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(512, 1024), nn.BatchNorm1d(1024))
    layout = Layout(trainable(model).items())
    flat = layout.over(Segment(layout.nbytes))
    bind(trainable(model), flat)
    return model, flat


def test_too_little_memory_is_an_error_with_both_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "free_bytes", lambda: 7 << 20)
    model, flat = shared_model()
    with expect_error(UserError, name="shared memory"):
        Arena.create(model, flat, None, mutable_frozen=(), results=4, on_snapshots=False, workers=3)
    monkeypatch.setattr(shared_memory, "free_bytes", lambda: None)
    assert (
        Arena.create(
            model, flat, None, mutable_frozen=(), results=4, on_snapshots=True, workers=3
        ).slots
        == 14  # 4 results, what late workers have, 2 for each worker, but snapshots
    )


def test_another_model_is_refused_by_name_with_both_shapes() -> None:
    model, flat = shared_model()
    text, fds = Arena.create(
        model, flat, None, mutable_frozen=(), results=2, on_snapshots=False, workers=1
    ).handed_over()
    other = nn.Sequential(nn.Linear(512, 1023), nn.BatchNorm1d(1023))
    with expect_error(UserError):
        Arena.attach(json.loads(json.dumps(text)), fds, other)


def test_what_one_side_writes_the_other_reads() -> None:
    model, flat = shared_model()
    mine = Arena.create(
        model, flat, None, mutable_frozen=(), results=2, on_snapshots=False, workers=2
    )
    text, fds = mine.handed_over()
    theirs = Arena.attach(
        json.loads(json.dumps(text)), [os.dup(fd) for fd in fds], shared_model()[0]
    )
    slot, same = mine.slot(3), theirs.slot(3)
    for (name, view), other in zip(same.flat.views.items(), slot.flat.views.values(), strict=True):
        view.fill_(len(name))
        assert torch.equal(view, other)
        assert view.data_ptr() % 64 == 0 or view.data_ptr() != same.flat.vectors[0].data_ptr()
    same.floats.fill_(2.5)
    assert slot.floats.eq(2.5).all()
    assert mine.slot(2).floats.eq(0).all()  # a slot of its own
    theirs.tell(1, "backward", 7, 3)
    doing = mine.doing(1)
    assert doing[:3] == ("backward", 7, 3)
    assert 0 <= time.monotonic() - doing.since < 5
    assert mine.doing(0).phase == "starting"
