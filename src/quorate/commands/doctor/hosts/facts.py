"""The findings of a doctor on several hosts, and between hosts: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quorate.commands.doctor.verdict import Verdict


@dataclass(frozen=True, eq=False)
class Report:
    """The report of a host about itself."""

    name: str
    address: str  # address for the other hosts
    interface: str | None  # interface with this address
    mbit_per_s: int | None  # of the interface, as reported by its driver
    faster: dict[str, int]  # active faster interfaces, in Mbit/s
    ranks: int
    torch: str | None
    cuda: str | None  # used for torch's build
    python: str
    kernels: str  # the properties of the processor that choose kernels
    gpus: tuple[str, ...]  # the kinds visible to torch
    driver: str | None
    sees_run_dir: str | None  # why the run directory is not the first host's; None: it is
    verdicts: tuple[Verdict, ...]  # on this host alone

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Report:
        """Return the report from the JSON of ``dataclasses.asdict``."""
        verdicts = tuple(Verdict(*each) for each in said["verdicts"])
        return cls(**{**said, "gpus": tuple(said["gpus"]), "verdicts": verdicts})


@dataclass(frozen=True)
class Crossing:
    """The network between two hosts. None: not measured."""

    one: int  # numbers of the hosts
    other: int
    ms: float | None = None  # round trip
    mbit_per_s: float | None = None  # from the first to the second
    back_mbit_per_s: float | None = None
    ahead_ms: float | None = None  # lead of the second clock, with an error of half of ``ms``
    failure: str | None = None  # why the second host cannot be reached


@dataclass(frozen=True)
class Hosts:
    """All findings on several hosts."""

    reports: tuple[Report, ...]
    crossings: tuple[Crossing, ...]
    store: str  # host and port
    run_dir: str | None  # the run directory to check
    restarts: int  # torchrun's --max-restarts
    is_store_shared: bool  # whether torchrun's agents and the ranks share a store
