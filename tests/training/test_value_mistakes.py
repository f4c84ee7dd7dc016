"""Mistakes without an error: a line names each, and no sound script has such a line."""

from typing import Any

import numpy as np
import pytest
import torch
from support.fits import fit
from support.value_mistakes import SCRIPTS, SGD, is_right, mlp, said_of, vectors
from torch import nn

from quorate.training.probing.summed_loss import LossValue, PartLosses, may_be_sum

STRICT = ("sum of squares", "outside head", "untrained biases", "queue of columns in 2 shards")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_mistake_is_said_and_a_sound_script_has_no_line(name: str) -> None:
    about, script = SCRIPTS[name]
    said = said_of(script)
    assert is_right(about, said, script.names), said


@pytest.mark.parametrize("name", STRICT)
def test_a_strict_run_refuses_what_is_said_of_values(name: str) -> None:
    about, script = SCRIPTS[name]
    (line,), error = said_of(script, strict=True)
    in_doubt = line.replace(":", " are in doubt:", 1).replace(" in doubt", "", 1)
    assert error == f"strict: the {in_doubt}"
    assert about in error


def test_a_loss_that_draws_may_be_a_sum_within_two_standard_errors() -> None:
    part = [LossValue(0.5, 3.0)] * 4
    for shares, may_be in (((0.0, 0.2), True), ((0.06, 0.14), False)):  # 0.1 on average, of 0.2
        halves = [[LossValue(1 - share / 2, 6.0)] * 2 for share in shares]
        assert may_be_sum([PartLosses(LossValue(1.0, 12.0), h, h, part) for h in halves]) == may_be


def test_looking_for_mistakes_leaves_no_trace() -> None:
    """The loss function counts and draws for its shards alone."""
    counts, total, drawn = {"calls": 0}, torch.zeros(()), torch.Generator().manual_seed(1)
    table, numbers, rows = np.zeros(3), np.random.default_rng(1), [0]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        counts["calls"] += 1
        total.add_(len(batch[0]))
        table[0] += 1
        rows.append(len(batch[0]))
        noise = torch.randn((), generator=drawn) + numbers.normal()
        return (model(batch[0]).square().sum() + 0 * noise) / 24

    sizes = {"batch_size": 24, "shards": 4, "workers": 1, "spot_check_every": 0}
    fit(mlp, loss, vectors(), optimizer=SGD, steps=3, **sizes)
    calls = counts["calls"]
    assert 12 <= calls <= 14  # two shards are computed twice, by a witness of their changes
    expected = torch.Generator().manual_seed(1), np.random.default_rng(1)
    for _ in range(calls):
        torch.randn((), generator=expected[0])
        expected[1].normal()
    assert (int(total), table[0], rows) == (6 * calls, calls, [0, *[6] * calls])
    assert torch.equal(drawn.get_state(), expected[0].get_state())
    assert numbers.bit_generator.state == expected[1].bit_generator.state
