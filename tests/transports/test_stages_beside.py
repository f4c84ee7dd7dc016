"""What user code reads beside the batch, in stages: where it is in its run, and ``Shared``."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from support.digests import digest_of
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.replica.beside import shared as shared_values


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have none of a test before, which a traceback may hold."""
    monkeypatch.setattr(shared_values, "_known", WeakValueDictionary())


class Net(nn.Module):
    """Its forward reads a ``Shared`` too."""

    def __init__(self, shared: quorate.Shared) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.ReLU())
        self.decoder = Decoder(shared)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.decoder(self.encoder(values))
        return logits


class Decoder(nn.Module):
    def __init__(self, shared: quorate.Shared) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.shared = shared

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layer(values) * (1 + self.shared.beta) - self.shared.centre
        return logits


def trained(*, staged: bool) -> str:
    """Train, and set shared values between updates."""
    torch.manual_seed(4)
    shared = quorate.Shared("shared", beta=0.0, centre=torch.zeros(3), teacher=nn.Linear(6, 3))

    def loss(model: nn.Module, batch: list[torch.Tensor], at: Any) -> dict[str, torch.Tensor]:
        values, labels = batch
        hard = at.progress + 0.1 * at.step + at.epoch + float(at.rows.sum()) / 1000
        logits = model(values * (1 + hard))  # before the call: every stage computes it
        wanted = shared.teacher(values)
        apart = (logits - wanted).square().mean() * (0.1 + shared.beta + at.progress)
        return {"loss": nn.functional.cross_entropy(logits, labels) + apart, "beta": shared.beta}

    torch.manual_seed(3)
    trainer = quorate.Trainer(
        Net(shared),
        loss,
        optimizer=quorate.Optimize(lambda p: torch.optim.Adam(p, lr=1e-2), ema_decay=0.9),
        batch_size=12,
        shards=3,
        devices="cpu+cpu" if staged else "cpu",
        workers=quorate.Workers(1, engine="towers"),
        compute=quorate.Compute(split=["decoder"] if staged else None),
    )
    rows = TensorDataset(torch.randn(36, 6), torch.randint(0, 3, (36,)))
    for report in trainer.updates(rows, epochs=2):
        step = report.global_step
        shared.beta = step / 10
        if step % 2:
            shared.centre = torch.full((3,), 0.1 * step)
        else:
            with torch.no_grad():
                shared.teacher.weight.lerp_(torch.ones(3, 6), 0.1)
    return digest_of(trainer)


@pytest.mark.usefixtures("way")
def test_where_a_shard_is_and_what_is_shared_are_those_of_one_piece() -> None:
    assert trained(staged=True) == trained(staged=False)
