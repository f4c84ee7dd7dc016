"""A model whose parts lie on two devices, trained on one and on two of such replicas.

    python tests/scripts/spread.py
    quorate run --engine processes --workers 2 tests/scripts/spread.py once

Prints a JSON object: digests and losses by name, and on which devices a replica's parts computed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.replica.digest import digest

sys.path.insert(0, str(Path(__file__).parent.parent))
from support import backend, front_door

PLACES: set[tuple[str, str]] = set()


class TwoParts(nn.Module):
    def __init__(self, one: str, other: str) -> None:
        super().__init__()
        self.lower = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU()
        ).to(one)
        self.upper = nn.Linear(16, 3).to(other)
        self.fixed = nn.Linear(3, 3).requires_grad_(False).to(other)
        self.upper.register_buffer("shift", torch.ones(3, device=other))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        seen = self.lower(images)
        weight = self.upper.weight
        PLACES.add((str(images.device), str(weight.device)))
        return self.fixed(self.upper(seen.to(weight.device)) + self.upper.shift)


def loss(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    logits = model(batch[0])
    labels = batch[1].to(logits.device)
    return {
        "loss": F.cross_entropy(logits, labels),
        "accuracy": (logits.argmax(1) == labels).float().mean(),
    }


def trained(devices: str, one: str, other: str, **options: Any) -> tuple[str, float]:
    torch.manual_seed(0)
    trainer = front_door.trainer(
        TwoParts(one, other),
        loss,
        optimizer=quorate.Optimize(lambda params: torch.optim.Adam(params, lr=0.01), ema_decay=0.9),
        batch_size=12,
        shards=4,
        devices=devices,
        workers=quorate.Workers(options.pop("workers", None), engine="towers"),
        **options,
    )
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(32, 1, 8, 8, generator=generator), torch.arange(32) % 3)
    for _ in trainer.updates(data, epochs=3):
        pass
    averaged = trainer.averaged_model
    assert averaged is not None
    tensors = [*trainer.model.state_dict().items(), *averaged.state_dict().items()]
    assert {tensor.device.type for _, tensor in tensors} == {"cpu"}
    return digest(tensors), trainer.evaluate(data)["loss"]


def main() -> None:
    backend.register()
    if sys.argv[1:] == ["once"]:
        print(json.dumps(trained("cpu+toy:0", "cpu", "toy:0")))
        return
    found = {
        "cpu": trained("cpu", "cpu", "cpu"),
        "one replica": trained("cpu+toy:0", "cpu", "toy:0"),
        "two replicas": trained("cpu+toy:0,toy:0+cpu", "cpu", "toy:0"),
        "two on the same": trained("cpu+toy:0", "cpu", "toy:0", workers=2),
    }
    places = sorted(PLACES)
    try:
        trained("toy:0", "toy:0", "toy:0", precision="bf16")
    except quorate.UserError as error:
        said = str(error)
    print(json.dumps({"trained": found, "places": places, "said": said}))


if __name__ == "__main__":
    main()
