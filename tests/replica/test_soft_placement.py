"""Soft placement, on a kind of device made for it: ``backend.py`` and ``scripts/soft.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import quorate
from quorate import Trainer
from quorate.replica.computing import Computing
from quorate.replica.notes import Notes
from quorate.replica.placement.placement import Placement
from quorate.replica.streams import Stream

SCRIPT = Path(__file__).parents[1] / "scripts" / "soft.py"
RUNS = [
    *("cpu 1", "toy:0 1 soft log", "toy:0 2 soft"),
    *("toy:0 1", "toy:0 1 soft turned", "toy:0 1 soft unwritten", "toy:0 1 soft compile"),
]


class Said(NamedTuple):
    """What a run said, and its last line."""

    lines: list[str]
    result: Any


@pytest.fixture(scope="module")
def runs() -> dict[str, Said]:
    """One process for all: it has the devices, and torch is imported once."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *RUNS], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found, lines = [], list[str]()
    for line in done.stdout.splitlines():
        if line.startswith(("{", "[")):
            found.append(Said(lines, json.loads(line)))
            lines = []
        else:
            lines.append(line)
    return dict(zip([*RUNS, "operators"], found, strict=True))


def test_the_numbers_are_the_cpus_on_any_number_of_workers(runs: dict[str, Said]) -> None:
    assert set(runs["cpu 1"].result) == {"parameters", "loss"}
    assert runs["toy:0 1 soft log"].result == runs["cpu 1"].result
    assert runs["toy:0 2 soft"].result == runs["cpu 1"].result


@pytest.mark.parametrize("run", ["toy:0 1 soft log", "toy:0 2 soft"])
def test_each_operator_is_named_once_with_who_called_it(runs: dict[str, Said], run: str) -> None:
    lines = runs[run].lines
    said = {
        line.partition(" has no kernel on toy")[0]: following.strip()
        for line, following in pairwise(lines)
        if "has no kernel" in line
    }
    assert said == {
        "aten::convolution": "called in module '0' (Conv1d)",
        "aten::convolution_backward": "called in the backward pass of module '0' (Conv1d)",
        "aten::cumsum": "called in module '3' (Cumulative)",
        "aten::sigmoid_backward": "called in the backward pass of module '3' (Cumulative)",
        "aten::native_dropout": "called in module '4' (Dropout)",
        "aten::tanh_": "called in module '6' (Inverse)",
        "aten::erfinv": "called in module '6' (Inverse)",
        "aten::rand_like": "called in module '6' (Inverse)",
        "aten::ones_like": "called in the loss function, outside of modules",
    }
    assert set(Counter(line for line in lines if "has no kernel" in line).values()) == {1}
    assert not any("has no kernel" in line for line in runs["cpu 1"].lines)


def test_the_log_shows_what_ran_on_the_cpu(runs: dict[str, Said]) -> None:
    lines = runs["toy:0 1 soft log"].lines
    assert "shards are computed on toy:0, sums and updates on toy:0" in lines
    head = lines.index("where the operators of a shard ran on a toy worker:")
    table = [line.split() for line in lines[head + 1 :] if not line.startswith("epoch")]
    assert table[0] == ["module", "class", "operator", "device", "forward", "backward"]
    assert ["5", "Linear", "addmm", "toy:0", "1"] in table
    assert ["0", "Conv1d", "convolution", "cpu", "1"] in table
    assert ["convolution_backward", "cpu", "1"] in table
    assert ["3", "Cumulative", "cumsum", "cpu", "1", "1"] in table


def test_without_it_the_error_names_operator_module_and_cure(runs: dict[str, Said]) -> None:
    result = runs["toy:0 1"].result
    assert result["raised"].startswith("NotImplementedError: convolution_overrideable not")
    assert result["notes"][0] == (
        "quorate: aten::convolution has no kernel on toy, called in module '0' (Conv1d); "
        "soft_placement=True (--soft-placement) runs it on the CPU"
    )


def test_what_cannot_run_on_the_cpu_says_why(runs: dict[str, Said]) -> None:
    result = runs["toy:0 1 soft turned"].result
    assert result["raised"].startswith("NotImplementedError: Could not run 'aten::view_as_real'")
    assert result["notes"][0] == (
        "quorate: aten::view_as_real has no kernel on toy, called in module '4' (Turned); it "
        "cannot run on the CPU: what it returns shares memory with what it is given"
    )


def test_the_scripts_own_errors_are_left_alone(runs: dict[str, Said]) -> None:
    result = runs["toy:0 1 soft unwritten"].result
    assert result["raised"] == "NotImplementedError: the script's own"
    assert not any("kernel" in note for note in result["notes"])


def test_it_is_not_for_compiled_models(runs: dict[str, Said]) -> None:
    assert runs["toy:0 1 soft compile"].result["raised"] == (
        "SettingError: soft_placement: got True, expected compile=False with it; leave off one of "
        "the two"
    )


def test_arguments_results_and_memory_are_as_on_the_cpu(runs: dict[str, Said]) -> None:
    assert runs["operators"].result == []


def test_the_example_on_two_devices(runs: dict[str, Said]) -> None:
    lines = [line.split() for line in runs["operators"].lines]
    assert lines[-2:] == [["tensor([[", "44.,", "56.],"], ["[", "98.,", "128.]])"]]
    assert ["mm", "toy:0", "1", "1"] in lines
    assert ["mm", "cpu", "1", "1"] in lines
    assert ["(the", "model)", "Sum", "_to_copy", "toy:0", "->", "cpu", "1"] in lines


class Undefined(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.erfinv(x.to(torch.complex64)).real


def test_a_dtype_without_a_kernel_on_the_cpu_is_named_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = Trainer(
        lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), Undefined()),
        lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4,
        devices="cpu",
        workers=quorate.Workers(1, engine="towers"),
        compute=quorate.Compute(soft_placement=True),
    )
    with pytest.raises(NotImplementedError, match="not implemented for 'ComplexFloat'") as caught:
        trainer.fit(torch.utils.data.TensorDataset(torch.ones(4, 2)))
    assert caught.value.__notes__[0] == (
        "quorate: aten::erfinv has no kernel on cpu, called in module '1' (Undefined); use another "
        "dtype or operator"
    )
    assert "soft_placement" not in capsys.readouterr().out


class Counted(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(x)


@pytest.mark.parametrize(
    ("soft", "then"),
    [
        (False, "soft_placement=True (--soft-placement) runs it on the CPU"),
        (True, "it cannot run on the CPU: Cannot copy out of meta tensor; no data!"),
    ],
)
def test_metas_operators_are_named(soft: bool, then: str) -> None:
    """``meta`` computes nothing, so it lacks those whose shape depends on numbers."""
    model = torch.nn.Sequential(Counted())
    computing = Computing(soft_placement=soft)
    placement = Placement([torch.device("meta")], computing, Notes(), until="")
    with Stream() as stream, pytest.raises(NotImplementedError) as caught:
        placement.run(
            lambda _watched: model(torch.ones(3, device="meta")), model, stream, training=True
        )
    assert caught.value.__notes__ == [
        f"quorate: aten::nonzero has no kernel on meta, called in module '0' (Counted); {then}"
    ]
