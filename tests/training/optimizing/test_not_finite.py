"""An update whose gradient is not finite: it is not made, and the run stops or goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import front_door
from support.messages import expect_error
from support.small import DATA, loss, trainer
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.errors import NotFiniteError, SettingError
from quorate.services.checkpoints import files


class Poisoned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def with_marks(*marks: tuple[int, int]) -> TensorDataset:
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
    mark = torch.zeros(48, 1)
    for row, kind in marks:
        mark[row] = kind
    return TensorDataset(x, mark)


def poisoned_trainer(run_dir: Path | None, **options: Any) -> quorate.Trainer:
    return front_door.trainer(
        Poisoned,
        options.pop("loss"),
        optimizer=quorate.Optimize(
            lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
            schedule=lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.9),
            ema_decay=0.9,
        ),
        batch_size=8,
        shards=4,
        devices="cpu",
        run_dir=run_dir,
        **options,
    )


def infinite(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    x, mark = batch
    y = model(x)
    return (
        y.square().mean()
        + (torch.where(mark == 2, torch.inf, 0.0) * y.abs())
        .nan_to_num(nan=0.0, posinf=torch.inf)
        .sum()
    )


def root_at_zero(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Finite, with a gradient that is not: the slope of a root at zero."""
    x, mark = batch
    y = model(x)
    return y.square().mean() + (y * 0.0 * (mark == 1) + (mark != 1)).sqrt().sum() * 1e-3


@pytest.mark.parametrize(
    ("make", "kind", "what"),
    [
        (root_at_zero, 1, "the gradient of first.weight, first.bias, last.weight, last.bias"),
        (infinite, 2, "the gradient of first.weight, first.bias, last.weight, last.bias"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_an_update_that_is_not_finite_is_not_made(
    make: Any, kind: int, what: str, workers: int, tmp_path: Path
) -> None:
    data = with_marks((21, kind))  # step 2, shard 2: rows 20 and 21
    run = poisoned_trainer(tmp_path, loss=make, workers=workers)
    with pytest.raises(NotFiniteError) as caught:
        run.fit(data, epochs=2, shuffle=False)
    said = str(caught.value)
    assert said.startswith(f"{what} is not finite in step 2: shard 2 (worker ")
    assert "rows 20, 21" in said or "rows [20, 21]" in said
    assert said.count("shard") == 1
    assert run.global_step == 2
    found = files.find(tmp_path)
    assert found is not None
    assert found.record["global_step"] == 2
    assert all(bool(value.isfinite().all()) for value in run.model.state_dict().values())


@pytest.mark.parametrize("workers", [1, 2])
def test_infinities_in_a_buffer_are_the_models_own_affair(workers: int) -> None:
    class Masked(Poisoned):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))

    run = quorate.Trainer(
        Masked, loss, optimizer=torch.optim.Adam, batch_size=12, shards=4, devices="cpu",
        workers=workers,
    )  # fmt: skip
    run.fit(DATA, steps=4)
    assert run.global_step == 4
    assert torch.equal(run.model.mask, torch.full((3, 3), -torch.inf).triu(1))


@pytest.mark.parametrize("update", ["sync", "async"])
def test_skipping_leaves_the_state_and_goes_on(update: str, tmp_path: Path) -> None:
    """Against a run over the same rows in which that step's gradient was never applied."""
    data = with_marks((9, 1), (30, 1))
    options = {"loss": root_at_zero, "nonfinite": "skip", "update": update, "workers": 1}
    run = poisoned_trainer(tmp_path, **options)
    run.fit(data, steps=4, shuffle=False)
    again = poisoned_trainer(tmp_path, **options)  # the count and the schedule go on
    again.fit(data, epochs=1, shuffle=False)

    plain = Poisoned()
    start = poisoned_trainer(None, **options).model.state_dict()
    plain.load_state_dict({k: v.clone() for k, v in start.items()})
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
    size = 8 if update == "sync" else 2
    for n, first in enumerate(range(0, 48, size)):
        rows = slice(first, first + size)
        x, mark = data.tensors[0][rows], data.tensors[1][rows]
        optimizer.param_groups[0]["lr"] = 0.01 * 0.9**n
        optimizer.zero_grad()
        total = sum(
            root_at_zero(plain, [x[k : k + 2], mark[k : k + 2]]) * 2 for k in range(0, size, 2)
        )
        (total / size).backward()
        if mark.sum() == 0:
            optimizer.step()
    for name, value in plain.state_dict().items():
        assert torch.allclose(again.model.state_dict()[name], value, atol=1e-6), name
    assert again.global_step == 48 // size
    found = files.find(tmp_path)
    assert found is not None
    assert found.record["account"]["not_finite"] == 2


def test_another_choice_is_refused() -> None:
    with expect_error(SettingError, name="nonfinite", got="ignore"):
        trainer(None, nonfinite="ignore")
