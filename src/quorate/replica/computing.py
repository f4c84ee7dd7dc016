"""How replicas compute a shard: one choice for all workers of a run."""

from __future__ import annotations

from dataclasses import dataclass

from quorate.replica.precision import FP32, Precision


@dataclass(frozen=True)
class Computing:
    """What ``Trainer`` was asked for; see its arguments of the same names."""

    precision: Precision = FP32
    compile: bool = False
    soft_placement: bool = False
    log_placement: bool = False
    deterministic: bool = False
