"""The measurements of a script's model: plain numbers, as a JSON object in a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quorate.machine.atomic_file import write_atomically
from quorate.replica.pipeline.balance import ModelPieces
from quorate.replica.pipeline.measure import Cost


@dataclass(frozen=True)
class ModelMeasurements:
    """The measurements of a model with one shard, and of the optimizer's state after one update."""

    device: str
    memory_bytes: int | None  # of the device; None: unknown
    rows: int  # rows of the shard
    calls: int  # calls of the model by one call of the loss function
    parameter_bytes: int
    trained_bytes: int  # parameters with a gradient
    optimizer_bytes: int
    names: list[str]  # split points of the finest cut
    costs: list[Cost]  # of the pieces, one more; empty if the model cannot be cut
    why_not: str  # why the model cannot be cut, or empty

    @property
    def pieces(self) -> ModelPieces:
        """The finest cut."""
        return ModelPieces(tuple(self.names), tuple(self.costs))

    @property
    def state_factor(self) -> float:
        """Bytes of optimizer state per byte of trained parameters."""
        return self.optimizer_bytes / max(1, self.trained_bytes)

    def write(self, path: Path) -> None:
        """Write the measurements to a file, completely or not at all."""
        write_atomically(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> ModelMeasurements:
        """Return the measurements from the JSON of ``write``."""
        return cls(**{**record, "costs": [Cost(**cost) for cost in record["costs"]]})
