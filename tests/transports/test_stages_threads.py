"""Stages that are threads, on devices of the tests' own: values are where they must be."""

from __future__ import annotations

import json
import os
import re
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

from quorate.errors import CutError
from quorate.replica.pipeline.on_devices.by_loss import UsedByLoss
from quorate.replica.pipeline.on_devices.following import Following
from quorate.transports.stages.handed import Hand, received

SCRIPT = Path(__file__).parents[1] / "scripts" / "stages_on_devices.py"
CPU, META = torch.device("cpu"), torch.device("meta")


@cache
def found() -> Any:
    words = [sys.executable, str(SCRIPT)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_bits_of_one_device() -> None:
    trained = found()["trained"]
    for name in ("two devices", "one device twice", "cut by itself"):
        assert trained[name] == trained["cpu"], name


@pytest.mark.slow
def test_a_device_has_what_its_stages_use_and_nothing_else() -> None:
    first = [f"lower.1.{name}" for name in ("bias", "weight")]
    norm = ["bias", "num_batches_tracked", "running_mean", "running_var", "weight"]
    last = [
        f"{layer}.{name}" for layer in ("fixed", "middle", "upper") for name in ("bias", "weight")
    ]
    assert found()["places"] == {
        "toy:0": sorted([*first, *(f"lower.2.{name}" for name in norm)]),
        "toy:1": sorted([*last, "shift", "lower.1.weight"]),  # the loss has a penalty on that
    }


@pytest.mark.slow
def test_what_devices_cannot_do_is_refused() -> None:
    kinds, order = found()["said"]
    assert kinds.startswith("split: got 'middle', expected none on cpu+toy:0; take")
    assert order.startswith(
        "pipeline: got 'interleaved', expected 1f1b, gpipe or zero-bubble on toy:0+toy:1"
    )


@pytest.mark.slow
def test_a_thread_that_hangs_is_named_and_its_worker_replaced(tmp_path: Path) -> None:
    late = ("--workers", "1", "--engine", "processes", "--worker-timeout-s", "8")
    words = ["run", *late, str(SCRIPT), "hang", str(tmp_path / "mark")]
    code, out, err = WARM.run(words, os.environ, 300)
    assert code == 0, out + err
    assert re.search(r"no answer for \d+ s in step 0, .* in stage 1 for .*; another is", out + err)
    assert json.loads(out.splitlines()[-1]) == found()["trained"]["cpu"]


def test_what_is_handed_over_is_a_copy_of_the_same_strides() -> None:
    values = torch.arange(24.0).view(4, 6)
    for tensor in (values.t(), values[:, ::2], values[:1].expand(5, 6)):
        (there,) = received(Hand(CPU).over([tensor]))
        assert torch.equal(there, tensor)
        assert there.stride() == tensor.stride()
        assert there.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_an_operator_runs_where_the_last_of_its_values_is() -> None:
    there, here = torch.ones(3, 2, device=META), torch.ones(2, requires_grad=True)
    with Following([CPU, META]):
        assert nn.functional.linear(here, there).device == META
        assert (here + 1).device == CPU
        assert torch.cat([here, there[0]]).device == META
        with expect_error(CutError, name="split"):
            torch.ones(2).add_(there[0])
        with expect_error(CutError, name="split"):
            torch._foreach_copy_([there[0], torch.ones(2)], [here, here])


def test_what_a_loss_uses_by_itself() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        batch = batch.to(next(model.parameters()).device)
        return model(batch).sum() + torch.stack([model[0].bias, model[1].running_mean]).sum()

    uses = UsedByLoss(model)
    uses.within(loss)(model, torch.ones(3, 2))
    assert uses.found == {"0.weight", "0.bias", "1.running_mean"}
    assert not model._forward_hooks
