"""Soft placement and the placement log, also on a kind of device made for them: ``soft.py``."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.warm import WARM
from torch import nn

from quorate.replica.placement.log import PlacementLog

SCRIPT = Path(__file__).parents[1] / "scripts" / "soft.py"
RUNS = ["cpu 1", "toy:0 2 soft log", "toy:0 1", "toy:0 1 soft turned"]
CALLERS = {
    "convolution": "called in module '0' (Conv1d)",
    "convolution_backward": "called in the backward pass of module '0' (Conv1d)",
    "cumsum": "called in module '3' (Cumulative)",
    "sigmoid_backward": "called in the backward pass of module '3' (Cumulative)",
    "native_dropout": "called in module '4' (Dropout)",
    "tanh_": "called in module '6' (Inverse)",
    "erfinv": "called in module '6' (Inverse)",
    "rand_like": "called in module '6' (Inverse)",
    "ones_like": "called in the loss function, outside of modules",
}


class Said(NamedTuple):
    """The lines of a run, and the last line as JSON."""

    lines: list[str]
    result: Any


@pytest.fixture(scope="module")
def runs() -> dict[str, Said]:
    """Use one process for all: the process has the devices, and torch is imported once."""
    words = [sys.executable, str(SCRIPT), *RUNS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found, lines = [], list[str]()
    for line in done.stdout.splitlines():
        if line.startswith(("{", "[")):
            found.append(Said(lines, json.loads(line)))
            lines = []
        else:
            lines.append(line)
    return dict(zip([*RUNS, "operators"], found, strict=True))


def lacking(lines: list[str]) -> dict[str, str]:
    """Return the caller of each operator without a kernel; each operator is named once."""
    named = [pair for pair in pairwise(lines) if " has no kernel on toy" in pair[0]]
    found = {line.split()[0].removeprefix("aten::"): caller.strip() for line, caller in named}
    assert len(found) == len(named)
    return found


def check_log(lines: list[str]) -> None:
    """Check the single table of the devices of operators."""
    title = "where the operators of a shard ran on a toy worker:"
    head, table = lines.index(title), [line.split() for line in lines]
    assert lines.count(title) == 1
    assert table[head + 1] == ["module", "class", "operator", "device", "forward", "backward"]
    assert ["5", "Linear", "addmm", "toy:0", "1"] in table
    assert ["0", "Conv1d", "convolution", "cpu", "1"] in table
    assert ["3", "Cumulative", "cumsum", "cpu", "1", "1"] in table


def test_numbers_are_the_cpus_and_each_operator_is_named_with_who_called_it(
    runs: dict[str, Said],
) -> None:
    assert runs["toy:0 2 soft log"].result == runs["cpu 1"].result
    assert lacking(runs["toy:0 2 soft log"].lines) == CALLERS
    assert lacking(runs["cpu 1"].lines) == {}
    check_log(runs["toy:0 2 soft log"].lines)


NO_KERNEL = "quorate: aten::{} has no kernel on toy, called in module {}"
ERRORS = {
    "toy:0 1": (
        "convolution_overrideable not",
        NO_KERNEL.format("convolution", "'0' (Conv1d)")
        + "; soft_placement=True (--soft-placement) runs it on the CPU",
    ),
    "toy:0 1 soft turned": (
        "Could not run 'aten::view_as_real'",
        NO_KERNEL.format("view_as_real", "'4' (Turned)")
        + "; it cannot run on the CPU: what it returns shares memory with what it is given",
    ),
}


@pytest.mark.parametrize("run", ERRORS)
def test_an_error_names_operator_module_and_cure(run: str, runs: dict[str, Said]) -> None:
    raised, note = ERRORS[run]
    assert runs[run].result["raised"].startswith(f"NotImplementedError: {raised}")
    assert runs[run].result["notes"][0] == note


def test_arguments_results_and_memory_are_as_on_the_cpu(runs: dict[str, Said]) -> None:
    assert runs["operators"].result == []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes look into /proc")
def test_what_processes_note_is_said_once(runs: dict[str, Said]) -> None:
    options = ["--engine", "processes", "--workers", "2", "--soft-placement", "--log-placement"]
    words = ["run", "--devices", "toy:0", *options, str(SCRIPT)]
    code, out, err = WARM.run(words, os.environ, 60)
    assert code == 0, err
    *lines, last = out.splitlines()
    assert json.loads(last) == runs["cpu 1"].result
    assert lacking(lines) == CALLERS
    check_log(lines)


# --- the log --------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)) + torch.tanh(self.inner(x + 1))


def logged(model: nn.Module) -> list[str]:
    with PlacementLog(model) as log:
        model(torch.ones(4, 3)).sum().backward()
    return [" ".join(line.split()) for line in log.table().splitlines()]


def test_calls_are_counted_by_module_forward_and_backward() -> None:
    assert logged(Pair()) == [
        "module class operator device forward backward",
        "(no module) ones cpu 1",
        "sum cpu 1",
        "ones_like cpu 1",
        "inner Linear addmm cpu 2",
        "mm cpu 2",
        "sum cpu 2",
        "add cpu 2",  # of two gradients
        "(the model) Pair tanh cpu 2",
        "add cpu 2",
        "tanh_backward cpu 2",
    ]
