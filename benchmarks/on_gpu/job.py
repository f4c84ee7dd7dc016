"""Job: what a process of a measurement is to do."""

from __future__ import annotations

from typing import NamedTuple


class Job(NamedTuple):
    """What a process is to do."""

    role: str
    devices: list[str]
    network: str = "seed"
    how: str = "eager"  # see ``loops``
    precision: str = "bf16"
    deterministic: bool = True
    engine: str = "towers"  # of quorate; or "loop", "ddp"
    workers: int = 1
    updates: int = 0  # before a digest is taken
    is_quick: bool = False
