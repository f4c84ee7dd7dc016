"""Mistakes that no error shows: a line names each, and no sound script has such a line.

All scripts: ``python -m support.value_mistakes`` in ``tests``, or QUORATE_TEST_VALUE_MISTAKES=1.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from support.value_mistakes import SCRIPTS, SGD, is_right, mlp, said_of, vectors
from torch import nn

import quorate
from quorate.training import prepare

EVERY = int(os.environ.get("QUORATE_TEST_VALUE_MISTAKES", "7"))  # of so many scripts one; 1: all


@pytest.mark.parametrize("name", [*SCRIPTS][::EVERY])
def test_a_mistake_is_said_and_a_sound_script_has_no_line(name: str) -> None:
    about, make = SCRIPTS[name]
    said = said_of(make)
    assert is_right(about, said, make().names), said


@pytest.mark.parametrize(
    "name", ["sum_of_squares", "outside_head", "untrained_biases", "queue_of_3_x_24_in_2_shards"]
)
def test_a_strict_run_refuses_what_is_said_of_values(name: str) -> None:
    about, make = SCRIPTS[name]
    lines, error = said_of(make, strict=True)
    assert len(lines) == 1
    assert (
        error
        == f"strict: the {lines[0].replace(':', ' are in doubt:', 1).replace(' in doubt', '', 1)}"
    )
    assert about in error


def test_looking_for_mistakes_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the loss function counts and draws is the same, whether it was looked for or not."""

    def train() -> list[Any]:
        torch.manual_seed(0)
        counts, total, drawn = {"calls": 0}, torch.zeros(()), torch.Generator().manual_seed(1)
        table, numbers, rows = np.zeros(3), np.random.default_rng(1), [0]

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            counts["calls"] += 1
            total.add_(len(batch[0]))
            table[0] += 1
            rows.append(len(batch[0]))
            noise = torch.randn((), generator=drawn) + numbers.normal()
            return (model(batch[0]).square().sum() + 0 * noise) / 24

        settings: dict[str, Any] = {"batch_size": 24, "shards": 4, "devices": "cpu", "workers": 1}
        trainer = quorate.Trainer(mlp(), loss, optimizer=SGD, **settings)
        losses = [report.metrics["loss"] for report in trainer.updates(vectors(), steps=3)]
        return [counts, total, drawn.get_state().tolist(), table.tolist(), rows, losses]

    with_a_look = train()
    monkeypatch.setattr(prepare, "look_for_mistakes", lambda *_: None)
    assert train() == with_a_look
