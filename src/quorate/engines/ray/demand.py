"""The demand of a run on a Ray cluster: workers and resources. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from quorate.engines.selection import RAY
from quorate.engines.workers import Workers
from quorate.errors import SettingError
from quorate.machine.devices import Devices, Group
from quorate.machine.resources import MOST_CPU_WORKERS, usable_cores

CPU, GPU = "CPU", "GPU"


@dataclass(frozen=True)
class RayDemand:
    """The number of workers, and the resources of each worker."""

    workers: int
    resources: Mapping[str, float]  # by Ray's names
    least: int | None = None  # with which a run begins, where more may come; None: with all

    @property
    def of_one_machine(self) -> int:
        """The number of workers with room in a cluster of this machine alone."""
        if self.least is None:
            return self.workers
        return max(self.least, min(self.workers, usable_cores()))

    def text(self) -> str:
        """Return the resources of a worker, as typed by a user: "CPU=1,GPU=1"."""
        return ",".join(f"{name}={number:g}" for name, number in self.resources.items())

    def missing(self, there: Mapping[str, float]) -> list[str]:
        """Return the lacking resources of a cluster, in words; empty: nothing is lacking.

        A growing group may get further nodes: the present resources say nothing.

        Args:
            there: the sum over all nodes.
        """
        if self.least is not None:
            return []
        return [
            f"{self.workers} workers of {name}={each:g} take {self.workers * each:g}, and it has "
            f"{there.get(name, 0.0):g}"
            for name, each in self.resources.items()
            if self.workers * each > there.get(name, 0.0) + 1e-9
        ]

    def options(self) -> dict[str, object]:
        """Return them as options of an actor."""
        others = {name: n for name, n in self.resources.items() if name not in (CPU, GPU)}
        return {
            "num_cpus": self.resources.get(CPU, 0.0),
            "num_gpus": self.resources.get(GPU, 0.0),
            "resources": others,
        }


def demanded(workers: Workers) -> RayDemand:
    """Return the demand of the settings.

    Raises:
        SettingError: they are not in order.
    """
    resources = _parsed(workers.worker_resources)
    if (bounds := workers.bounds()) is not None:
        least, most = bounds
        return RayDemand(most, resources, None if least == most else least)
    if workers.address is not None:
        expected = "how many workers, as the cluster is not this run's alone"
        raise SettingError("workers", None, expected, "say it: --workers 4")
    return RayDemand(min(usable_cores(), MOST_CPU_WORKERS), resources)


def groups_of(demand: RayDemand, devices: Devices) -> tuple[Group, ...]:
    """Return the devices of each worker, as the worker's process will see them.

    Raises:
        SettingError: the named devices contradict the resources.
    """
    # Ray counts other accelerators by other names, and hides devices by CUDA_VISIBLE_DEVICES.
    kind = "cuda" if demand.resources.get(GPU) else "cpu"
    if devices is not None and str(devices) != kind:
        expected = f"{kind}, as each worker has {demand.text()}"
        fix = "leave devices out: worker_resources says what a worker takes of its node"
        raise SettingError("devices", devices, expected, fix)
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", 0)
    return (Group([device]),) * demand.workers


def require_servers_fit(workers: Workers) -> None:
    """Refuse servers where nothing of them would be used.

    Raises:
        SettingError: the engine has none.
    """
    if workers.servers is not None and workers.engine != RAY:
        fix = "they are of a Ray cluster: add engine='ray', or leave them out"
        raise SettingError("servers", workers.servers, "none for another engine", fix)


def _parsed(text: str) -> dict[str, float]:
    resources = {}
    for entry in text.split(","):
        name, _, number = (word.strip() for word in entry.partition("="))
        try:
            resources[name] = float(number)
        except ValueError:
            name = ""
        if not name or not 0 <= resources[name] < float("inf"):
            expected = "names of Ray's resources with a number each"
            raise SettingError("worker_resources", text, expected, 'for example "CPU=1,GPU=1"')
    if resources.get(GPU, 0.0) not in (0.0, 1.0):
        fix = "a worker has one device: start more workers"
        raise SettingError("worker_resources", text, "GPU=0 or GPU=1", fix)
    return resources
