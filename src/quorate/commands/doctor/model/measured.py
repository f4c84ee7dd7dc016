"""What was measured of a script's model: plain numbers, as one JSON object in a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quorate.machine.atomic_file import write_atomically
from quorate.replica.pipeline.balance import Pieces
from quorate.replica.pipeline.measure import Cost


@dataclass(frozen=True)
class Measured:
    """A model with one shard, and the optimizer's state after one update."""

    device: str
    memory_bytes: int | None  # that the device has; None: it does not say
    rows: int  # of the shard
    calls: int  # of the model, in one call of the loss function
    parameter_bytes: int
    trained_bytes: int  # of these, what has a gradient
    optimizer_bytes: int
    names: list[str]  # split points of the finest cut
    costs: list[Cost]  # of its pieces, one more; none if it cannot be cut
    why_not: str  # it cannot be cut; empty if it can

    @property
    def pieces(self) -> Pieces:
        """The finest cut."""
        return Pieces(tuple(self.names), tuple(self.costs))

    @property
    def state_factor(self) -> float:
        """Bytes of optimizer state for a byte of trained parameters."""
        return self.optimizer_bytes / max(1, self.trained_bytes)

    def write(self, path: Path) -> None:
        """Write it to a file, as a whole or not at all."""
        write_atomically(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Measured:
        """Return what ``write`` wrote."""
        return cls(**{**record, "costs": [Cost(**cost) for cost in record["costs"]]})
