"""What the witness costs: the look around each shard, and spot checks, as shares of the time.

    python benchmarks/witness.py [--seconds 20] [--json FILE]

One training per model, on one tower. The look is measured where it is made, by the CPU time of the
tower's thread, and divided by that of whole shards: so it is the same figure on a busy machine.
Spot checks are timed by the clock, from the second one on: the first comes after the first update.
``small`` takes about 1 ms per shard; ``seed`` is the seed network.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from fashion_mnist import Net, loss

import quorate
from quorate.engines.spot_check import SpotChecks
from quorate.replica.replica import Replica
from quorate.replica.witness.witness import Witness

ROWS, PER_WORKER = 12_800, 64
WARM_UP = 30  # updates
KEPT = (Witness.begin, Witness.end, Replica.gradient, SpotChecks.updated)


class Small(nn.Module):
    """An MLP of twenty parameters, whose shard of 64 rows takes about 1 ms."""

    def __init__(self) -> None:
        super().__init__()
        widths = [784, *[64] * 9, 10]
        self.layers = nn.ModuleList(nn.Linear(one, other) for one, other in pairwise(widths))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = images.flatten(1).float() / 255
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        logits: torch.Tensor = self.layers[-1](x)
        return logits


def small_loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Cross entropy."""
    return F.cross_entropy(model(batch[0]), batch[1])


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "small": (Small, small_loss),
    "seed": (Net, loss),
}


def data() -> TensorDataset:
    """Random images and labels of Fashion-MNIST's shapes and dtypes."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (ROWS, 1, 28, 28), dtype=torch.uint8, generator=draw)
    return TensorDataset(images, torch.randint(0, 10, (ROWS,), generator=draw))


class Clock:
    """CPU time of the calling thread within some functions, and how often they were called."""

    def __init__(self) -> None:
        self.spent_s, self.calls = 0.0, 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent_s += time.thread_time() - begun
                self.calls += 1

        return timed


class Measured(NamedTuple):
    """Of one model."""

    shard_s: float  # CPU time
    look: float  # share of it
    checks: float  # share of the time that spot checks took
    number: int  # of these


def measured(kind: str, seconds: float) -> Measured:
    """Train a model for so long."""
    model, function = MODELS[kind]
    trainer = quorate.Trainer(
        model,
        function,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        batch_size=PER_WORKER,
        shards=1,
        devices="cpu",
        workers=quorate.Workers(1, engine="towers"),
    )
    look, shards = Clock(), Clock()
    Witness.begin, Witness.end = map(look.around, KEPT[:2])  # type: ignore[method-assign]
    Replica.gradient = shards.around(KEPT[2])  # type: ignore[method-assign]
    checked: list[tuple[float, float]] = []  # (when, how long)

    def updated(self: SpotChecks, step: int, patience_s: float) -> None:
        begun, before = time.perf_counter(), self.made
        KEPT[3](self, step, patience_s)
        if self.made != before:
            checked.append((time.perf_counter(), time.perf_counter() - begun))

    SpotChecks.updated = updated  # type: ignore[method-assign]
    begun = None
    for update in trainer.updates(data(), epochs=10**6):
        if update.global_step == WARM_UP:
            look.spent_s = shards.spent_s = 0.0
            look.calls = shards.calls = 0
            begun = time.perf_counter()
        if begun is not None and time.perf_counter() > begun + seconds:
            break
    Witness.begin, Witness.end, Replica.gradient, SpotChecks.updated = KEPT  # type: ignore[method-assign]
    of_checks = 0.0
    if len(checked) > 2:  # between the ends of the first and of the last
        of_checks = sum(s for _, s in checked[1:]) / (checked[-1][0] - checked[0][0])
    return Measured(
        shards.spent_s / shards.calls, look.spent_s / shards.spent_s, of_checks, len(checked)
    )


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="for each figure")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {}
    print("model  ms per shard  look around it  spot checks")
    for kind in MODELS:
        found[kind] = m = measured(kind, options.seconds)
        share = f"{m.checks:.2%} in {m.number} checks" if m.number > 2 else "too few to tell"
        print(f"{kind:5}  {1000 * m.shard_s:12.2f}  {m.look:14.2%}  {share}")
    if options.json:
        options.json.write_text(json.dumps({kind: m._asdict() for kind, m in found.items()}) + "\n")


if __name__ == "__main__":
    main()
