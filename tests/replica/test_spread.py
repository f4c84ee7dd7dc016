"""A replica over several devices: the same numbers, each part where the script put it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.messages import expect_error
from support.warm import WARM
from torch import nn

from quorate.errors import SettingError
from quorate.machine.devices import Group
from quorate.replica.spread import Spread

SCRIPT = Path(__file__).parents[1] / "scripts" / "spread.py"
CPU, META = torch.device("cpu"), torch.device("meta")


@cache
def found() -> Any:
    words = [sys.executable, str(SCRIPT)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_a_model_that_is_spread_gives_the_bits_of_one_that_is_not() -> None:
    trained = found()["trained"]
    for name in ("one replica", "two replicas", "two on the same"):
        assert trained[name] == trained["cpu"], name


def test_each_part_computes_where_the_script_put_it() -> None:
    # The second replica is on the same devices the other way round.
    assert [p for p in found()["places"] if p[0] != p[1]] == [["cpu", "toy:0"], ["toy:0", "cpu"]]


@pytest.mark.slow
def test_worker_processes_are_spread_too() -> None:
    words = ["run", "--engine", "processes", "--workers", "2", str(SCRIPT), "once"]
    code, out, err = WARM.run(words, os.environ, 120)
    assert code == 0, out + err
    assert json.loads(out.splitlines()[-1]) == found()["trained"]["cpu"]


def test_a_precision_that_a_device_does_not_know_is_refused() -> None:
    assert found()["said"].startswith("precision: got 'bf16', expected fp32 on toy")


def two_parts() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device=META))


@pytest.mark.parametrize(
    ("model", "groups"),
    [
        (nn.Linear(2, 2), [(CPU, META)]),
        (two_parts(), [(CPU, META), (CPU,)]),
        (two_parts(), [(CPU, CPU)]),
    ],
)
def test_what_does_not_fit_is_refused(model: nn.Module, groups: Any) -> None:
    with expect_error(SettingError):
        Spread(model, [Group(group) for group in groups])
