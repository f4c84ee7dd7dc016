"""The program of a worker: what its process computes with, as the script built it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quorate.coordination.plan import Order
from quorate.coordination.sampling import EpochRows
from quorate.data.draws import Augment
from quorate.data.source import Collate
from quorate.engines.stages.new_replica import Split, Spread
from quorate.machine.devices import Group
from quorate.replica.computing import Computing
from quorate.replica.loss import Loss
from quorate.replica.totals import Wanted


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a worker process computes with: it comes from the script, not from the coordinator.

    Functions and datasets cannot travel between processes, so that each worker makes its own by
    running the script. Parameters, rows' order and what is to be computed are the coordinator's.
    """

    model: torch.nn.Module
    loss: Loss
    totals: Wanted
    group: Group  # the worker's devices
    datasets: Mapping[str, Any]  # by the names that the coordinator asks for
    spread: Spread | Split | None
    collates: Mapping[str, Collate | None]  # by the same names
    augment: Augment | None
    order: Order | None
    sampling: EpochRows | None
    threads: int  # intra-op
    computing: Computing
