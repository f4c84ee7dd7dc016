"""The contrastive example: value and gradient of a whole batch, and one digest on any workers."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import contrastive
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from open_data.fashion_mnist import TEST_IMAGES, TEST_LABELS, TRAIN_IMAGES, TRAIN_LABELS
from support.runs import inspected
from support.warm import WARM
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.coordination.plan import Plan

EXAMPLE = Path(__file__).parents[2] / "examples" / "contrastive.py"


def mirrored(model: Any, batch: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Views without random numbers, which are those of a shard."""
    views = batch[0], batch[0].flip(3)
    return tuple(F.normalize(model.projection(model.features(v)), dim=1) for v in views)


def images(rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Smooth ones that differ: of noise, all alike, some feature lies where ReLU has its kink."""
    coarse = torch.rand(rows, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    return F.interpolate(coarse.to(dtype), (28, 28), mode="bilinear")


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_value_and_gradient_are_those_of_one_whole_batch(dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    model = contrastive.Encoder().to(dtype)
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def fresh() -> nn.Module:
        made = contrastive.Encoder().to(dtype)
        made.load_state_dict(start)
        return made

    data = TensorDataset(images(24, dtype), torch.zeros(24))
    trainer = quorate.Trainer(
        fresh, quorate.Gather(mirrored, contrastive.info_nce),
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        batch_size=24, shards=3, seed=0, devices="cpu",
        workers=quorate.Workers(2, engine="towers"), compute=quorate.Compute(spot_check_every=0),
    )  # fmt: skip
    (report,) = trainer.updates(data, steps=1)
    plan = Plan(rows=24, batch_size=24, shards=3, seed=0)
    rows = torch.cat([torch.as_tensor(list(plan.shard(0, shard))) for shard in range(3)])
    whole = contrastive.info_nce(model, mirrored(model, [images(24, dtype)[rows]]))
    whole["loss"].backward()
    assert report.metrics["loss"] == pytest.approx(whole["loss"].item(), abs=bound)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        gradient = start[name] - trainer.model.state_dict()[name]
        torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=bound)


@pytest.mark.slow
def test_it_runs_and_has_one_digest_on_one_and_two_workers(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    generator = np.random.default_rng(0)
    for images_name, labels_name, rows in (
        (TRAIN_IMAGES, TRAIN_LABELS, 600),
        (TEST_IMAGES, TEST_LABELS, 60),
    ):
        drawn = generator.integers(0, 255, (rows, 28, 28), dtype=np.uint8)
        labels = generator.integers(0, 10, rows, dtype=np.uint8)
        header = struct.pack(">HBBIII", 0, 8, 3, rows, 28, 28)
        (data / images_name).write_bytes(header + drawn.tobytes())
        (data / labels_name).write_bytes(struct.pack(">HBBI", 0, 8, 1, rows) + labels.tobytes())
    digests = []
    for workers in ("1", "2"):
        where = tmp_path / workers
        code, out, err = WARM.run(
            [
                *("run", "--devices", "cpu", "--workers", workers, str(EXAMPLE)),
                *("--data", str(data), "--run-dir", str(where)),
                *("--epochs", "1", "--target", "0"),
            ],
            dict(os.environ),
            200,
        )
        assert code == 0, out + err
        assert out.splitlines()[-1].endswith("of the test images are found among 512")
        digests.append(inspected(where)["digest"])
    assert digests[0] == digests[1]
