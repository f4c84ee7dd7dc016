"""What was measured of a training loop: plain numbers, as one JSON object in a file."""

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
    """What one worker did in the measured time."""

    worker: int
    device: str  # with + between several
    shards: int  # begun in it
    seconds: dict[str, float]  # in each of PHASES

    @property
    def devices(self) -> list[str]:
        """The names of its devices."""
        return self.device.split("+")


@dataclass(frozen=True)
class Measured:
    """Some updates of a training loop, after its warm-up.

    Neither evaluations nor digests are in ``seconds``, in the workers' or in any other.
    """

    # What ran.
    update: str  # the rule
    keeps_bits: bool
    engine: str
    threads: int  # per worker
    cores: int  # that the process may use
    shards: int
    batch_size: int  # rows
    loader_workers: int
    # The measured time.
    updates: int
    rows: int  # that they were made of
    seconds: float
    workers: list[WorkerTime]
    device_s: float  # the coordinator waited for devices that compute beside their workers
    exchange_s: float  # it collected gradients, added them up and handed parameters back
    update_s: float  # it divided, clipped, and made the optimizer's step
    beside_s: float  # the loop's caller had a report: callbacks, logs, saves, the loop's own body
    evaluation_s: float
    others_cores: float  # that other programs used meanwhile, about
    # The run.
    warm_up: int  # updates before
    digests: dict[int, str]  # after so many updates; none where bits depend on timing
    # Stages, if replicas have such.
    pipeline: str | None = None  # in which order they compute
    stages: list[StageTime] = field(default_factory=list)
    # A worker that was killed after all that, if that was asked for.
    detection_s: float | None = None  # until the coordinator knew
    restart_s: float | None = None  # from then on, until it computed again

    @property
    def examples_per_s(self) -> float:
        """Rows per second."""
        return self.rows / self.seconds

    @property
    def step_s(self) -> float:
        """Seconds from one update to the next."""
        return self.seconds / self.updates

    def write(self, path: Path) -> None:
        """Write it to a file, as a whole or not at all."""
        write_atomically(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Measured:
        """Return what ``write`` wrote."""
        workers = [WorkerTime(**worker) for worker in record["workers"]]
        digests = {int(n): digest for n, digest in record["digests"].items()}
        stages = [StageTime(**stage) for stage in record["stages"]]
        return cls(**{**record, "workers": workers, "digests": digests, "stages": stages})


def no_seconds() -> dict[str, float]:
    """Return no time in any of a worker's phases."""
    return dict.fromkeys(PHASES, 0.0)
