"""What a doctor found on several hosts, and between them: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quorate.commands.doctor.verdict import Verdict


@dataclass(frozen=True, eq=False)
class Report:
    """What a host says of itself."""

    name: str
    address: str  # by which the others reach it
    interface: str | None  # that has this address
    mbit_per_s: int | None  # of the interface, as its driver says
    faster: dict[str, int]  # interfaces that are up and faster: their Mbit/s
    ranks: int
    torch: str | None
    cuda: str | None  # that torch was built with
    python: str
    kernels: str  # the processor, as far as its kernels' results depend on it
    gpus: tuple[str, ...]  # the kinds that torch sees
    driver: str | None
    sees_run_dir: str | None  # why the run directory is not that of the first host; None: it is
    verdicts: tuple[Verdict, ...]  # on this host alone

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Report:
        """Return what ``dataclasses.asdict`` has made plain."""
        verdicts = tuple(Verdict(*each) for each in said["verdicts"])
        return cls(**{**said, "gpus": tuple(said["gpus"]), "verdicts": verdicts})


@dataclass(frozen=True)
class Crossing:
    """What lies between two hosts. What was not measured is None."""

    one: int  # numbers of the hosts
    other: int
    ms: float | None = None  # there and back
    mbit_per_s: float | None = None  # from one to the other
    back_mbit_per_s: float | None = None
    ahead_ms: float | None = None  # the other's clock, with an error of half of ``ms``
    failure: str | None = None  # why the other cannot be reached


@dataclass(frozen=True)
class Hosts:
    """All that was found."""

    reports: tuple[Report, ...]
    crossings: tuple[Crossing, ...]
    store: str  # host and port
    run_dir: str | None  # that was asked about
    restarts: int  # torchrun's --max-restarts
    is_store_shared: bool  # whether torchrun's agents and the ranks have one store
