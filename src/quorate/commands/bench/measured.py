"""The measurements of a training loop: plain numbers, as a JSON object in a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quorate.commands.bench.stages import StageTime
from quorate.engines.worker_status import PHASES
from quorate.machine.atomic_file import write_atomically


@dataclass(frozen=True)
class WorkerTime:
    """The activity of one worker in the measured time."""

    worker: int
    device: str  # several are joined by +
    shards: int  # begun in the measured time
    seconds: dict[str, float]  # in each of PHASES

    @property
    def devices(self) -> list[str]:
        """The names of the worker's devices."""
        return self.device.split("+")


@dataclass(frozen=True)
class Measured:
    """The measurements of some updates of a training loop, after its warm-up.

    ``seconds``, of the run and of the workers, and all other times exclude evaluations and digests.
    """

    # The configuration.
    update: str  # the update rule
    keeps_bits: bool
    engine: str
    threads: int  # per worker
    cores: int  # available to the process
    shards: int
    batch_size: int  # rows
    loader_workers: int
    # The measured time.
    updates: int
    rows: int  # in the updates
    seconds: float
    workers: list[WorkerTime]
    device_s: float  # the coordinator waited for devices that compute asynchronously
    exchange_s: float  # the coordinator collected gradients, summed them and published parameters
    update_s: float  # the coordinator divided, clipped, and stepped the optimizer
    beside_s: float  # the loop's caller held a report: callbacks, logs, saves, the loop's body
    evaluation_s: float
    others_cores: float  # approximate cores used by unrelated programs meanwhile
    # The rest of the run.
    warm_up: int  # updates before the measured time
    digests: dict[int, str]  # by number of updates; empty if bits depend on timing
    # Stages, if replicas have stages.
    pipeline: str | None = None  # the schedule
    stages: list[StageTime] = field(default_factory=list)
    # A worker killed after the measured time, if requested.
    detection_s: float | None = None  # until the coordinator noticed
    restart_s: float | None = None  # from the detection until the worker computed again

    @property
    def examples_per_s(self) -> float:
        """Rows per second."""
        return self.rows / self.seconds

    @property
    def step_s(self) -> float:
        """Seconds between two updates."""
        return self.seconds / self.updates

    def write(self, path: Path) -> None:
        """Write the measurements to a file, completely or not at all."""
        write_atomically(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Measured:
        """Return the measurements from the JSON of ``write``."""
        workers = [WorkerTime(**worker) for worker in record["workers"]]
        digests = {int(n): digest for n, digest in record["digests"].items()}
        stages = [StageTime(**stage) for stage in record["stages"]]
        return cls(**{**record, "workers": workers, "digests": digests, "stages": stages})


def no_seconds() -> dict[str, float]:
    """Return zero seconds for each phase of a worker."""
    return dict.fromkeys(PHASES, 0.0)
