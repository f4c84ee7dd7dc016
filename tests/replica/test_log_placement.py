"""The placement log: which operator of which module ran where."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support.warm import WARM
from torch import nn

import quorate
from quorate import Trainer
from quorate.replica.placement import log as placement_log
from quorate.replica.placement.log import PlacementLog

SCRIPTS = Path(__file__).parents[1] / "scripts"


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)) + torch.tanh(self.inner(x + 1))


def logged(model: nn.Module, rows: int = 4) -> list[list[str]]:
    with PlacementLog(model) as log:
        model(torch.ones(rows, 3)).sum().backward()
    return [line.split() for line in log.table().splitlines()]


def test_calls_are_counted_by_module_forward_and_backward() -> None:
    assert logged(Pair()) == [
        ["module", "class", "operator", "device", "forward", "backward"],
        ["(no", "module)", "ones", "cpu", "1"],
        ["sum", "cpu", "1"],
        ["ones_like", "cpu", "1"],
        ["inner", "Linear", "addmm", "cpu", "2"],
        ["mm", "cpu", "2"],
        ["sum", "cpu", "2"],
        ["add", "cpu", "2"],  # of two gradients
        ["(the", "model)", "Pair", "tanh", "cpu", "2"],
        ["add", "cpu", "2"],
        ["tanh_backward", "cpu", "2"],
    ]


def test_a_long_table_has_a_line_for_modules_that_did_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = [nn.Linear(3, 3) for _ in range(20)]
    model = nn.Sequential(*layers, nn.Tanh())
    lines = [" ".join(line) for line in logged(model)]
    assert "0 Linear addmm cpu 1" in lines  # the input wants no gradient
    assert "1 and 18 more Linear addmm cpu 1" in lines
    assert "20 Tanh tanh cpu 1" in lines
    assert len(lines) < 20
    monkeypatch.setattr(placement_log, "MOST_ROWS", 1000)
    assert len(logged(model)) > 40


def test_a_copy_says_from_where_to_where() -> None:
    with PlacementLog(nn.Identity()) as log:
        torch.ones(3).to("meta").add(1)
    lines = [line.split() for line in log.table().splitlines()]
    assert ["_to_copy", "cpu", "->", "meta", "1"] in lines
    assert ["add", "meta", "1"] in lines


def fitted(*, log: bool, workers: int = 1) -> torch.Tensor:
    trainer = Trainer(
        lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)),
        lambda model, batch: nn.functional.binary_cross_entropy_with_logits(
            model(batch[0])[:, 0], batch[1]
        ),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=8,
        shards=2,
        devices="cpu",
        workers=quorate.Workers(workers, engine="towers"),
        compute=quorate.Compute(log_placement=log),
    )
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(24, 3, generator=generator)
    trainer.fit(torch.utils.data.TensorDataset(rows, (rows[:, 0] > 0).float()))
    return torch.cat([parameter.detach().reshape(-1) for parameter in trainer.model.parameters()])


def test_towers_show_one_table_and_the_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    plain = fitted(log=False)
    assert "operator" not in capsys.readouterr().out
    assert torch.equal(fitted(log=True, workers=2), plain)
    out = capsys.readouterr().out
    assert "shards are computed on cpu, sums and updates on cpu\n" in out
    assert out.count("where the operators of a shard ran on a cpu worker:\n") == 1
    assert out.count("module  ") == 1
    assert "_foreach" not in out  # quorate's own copies are no operators of the user's


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes look into /proc")
def test_what_processes_note_is_said_once() -> None:
    """Of soft placement, too."""
    script = str(SCRIPTS / "lacking.py")
    wanted = ["--engine", "processes", "--workers", "2", "--soft-placement", "--log-placement"]
    code, out, err = WARM.run(["run", "--devices", "toy:0", *wanted, script], os.environ, 60)
    assert code == 0, err
    assert out.count("where the operators of a shard ran on a toy worker:\n") == 1
    assert "shards are computed on toy:0, sums and updates on cpu\n" in out
    lines = [line.split() for line in out.splitlines()]
    assert sum(line[:2] == ["module", "class"] for line in lines) == 1
    assert ["0", "Linear", "addmm", "toy:0", "1"] in lines
    assert ["1", "Cumulative", "cumsum", "cpu", "1", "1"] in lines
    for operator in ("cumsum", "sigmoid_backward", "native_dropout"):
        assert out.count(f"aten::{operator} has no kernel on toy and runs on the CPU\n") == 1

    alone = ["--devices", "cpu", "--engine", "towers", "--workers", "1"]
    code, plain, err = WARM.run(["run", *alone, script], os.environ, 60)
    assert code == 0, err
    assert plain.splitlines()[-1].startswith("parameters ")
    assert out.splitlines()[-1] == plain.splitlines()[-1]
