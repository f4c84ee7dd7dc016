"""A model in stages that are threads, on devices of the tests' own: digests, and where values were.

    python tests/scripts/stages_on_devices.py
    quorate run --engine processes --workers 2 tests/scripts/stages_on_devices.py once
    quorate run --engine processes --worker-timeout-s 8 tests/scripts/stages_on_devices.py hang MARK

Prints a JSON object: digests and losses by name, and where the tensors of stages lay. ``hang``: the
second stage waits for ever, once; then there is the file ``MARK``.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.replica.digest import digest
from quorate.transports.stages import part

sys.path.insert(0, str(Path(__file__).parent.parent))
from support import backend, front_door


class Net(nn.Module):
    """A value over the cut, buffers on both sides, a layer without gradient; no word of devices."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.middle = nn.Linear(16, 16)
        self.upper = nn.Linear(16, 3)
        self.fixed = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        seen = self.lower(images)
        return self.fixed(self.upper(self.middle(seen) + seen) + self.shift)


def loss(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    logits = model(batch[0])
    if sys.argv[1:2] == ["hang"] and threading.current_thread().name == "quorate-stage-1":
        with suppress(FileExistsError):
            Path(sys.argv[2]).touch(exist_ok=False)
            time.sleep(3600)
    penalty = model.lower[1].weight.square().sum()  # of the first stage
    return {
        "loss": F.cross_entropy(logits, batch[1]) + 1e-3 * penalty,
        "accuracy": (logits.argmax(1) == batch[1]).float().mean(),
    }


def trained(
    devices: str, split: list[str] | None = None, pipeline: str = "1f1b"
) -> tuple[str, float]:
    torch.manual_seed(0)
    trainer = front_door.trainer(
        Net(),
        loss,
        optimizer=quorate.Optimize(lambda params: torch.optim.Adam(params, lr=0.01), ema_decay=0.9),
        batch_size=12,
        shards=4,
        devices=devices,
        workers=None if sys.argv[1:] else quorate.Workers(1, engine="towers"),
        compute=quorate.Compute(split=split, pipeline=pipeline),
    )
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(32, 1, 8, 8, generator=generator), torch.arange(32) % 3)
    trainer.fit(data, epochs=3, validation=data)
    averaged = trainer.averaged_model
    assert averaged is not None
    tensors = [*trainer.model.state_dict().items(), *averaged.state_dict().items()]
    assert {tensor.device.type for _, tensor in tensors} == {"cpu"}
    return digest(tensors), trainer.evaluate(data)["loss"]


def places() -> dict[str, list[str]]:
    """Where the tensors of each device's copy of the model lie, as threads have them."""
    found: dict[str, list[str]] = {}

    class Seen(part.Part):
        def refresh(self, *given: Any) -> None:
            super().refresh(*given)
            named = (*self.model.named_parameters(), *self.model.named_buffers())
            here = [name for name, tensor in named if tensor.device == self.device]
            assert {t.device.type for _, t in named} <= {self.device.type, "meta"}
            found[str(self.device)] = sorted(here)

    original, threaded = part.Part, sys.modules["quorate.transports.stages.threaded"]
    vars(threaded)["Part"] = Seen
    try:
        trained("toy:0+toy:1", ["middle"])
    finally:
        vars(threaded)["Part"] = original
    return found


def main() -> None:
    backend.register()
    if sys.argv[1:]:
        print(json.dumps(trained("toy:0+toy:1", ["middle"])))
        return
    ways = {
        "cpu": trained("cpu"),
        "two devices": trained("toy:0+toy:1", ["middle"]),
        "one device twice": trained("toy:0+toy:0", ["middle"]),
        "cut by itself": trained("toy:0+toy:1"),
    }
    said = []
    for devices, pipeline in (("cpu+toy:0", "1f1b"), ("toy:0+toy:1", "interleaved")):
        try:
            trained(devices, None if pipeline == "interleaved" else ["middle"], pipeline)
        except quorate.UserError as error:
            said.append(str(error))
    print(json.dumps({"trained": ways, "places": places(), "said": said}))


if __name__ == "__main__":
    main()
