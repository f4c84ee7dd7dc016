"""The program of a worker process: model, loss and data, as built by the script."""

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
    """Everything of a worker process from the script instead of the coordinator.

    Functions and datasets cannot travel between processes, so each worker makes its own by running
    the script. Parameters, the order of rows and requests come from the coordinator.
    """

    model: torch.nn.Module
    loss: Loss
    totals: Wanted
    group: Group  # the worker's devices
    datasets: Mapping[str, Any]  # by the coordinator's names
    spread: Spread | Split | None
    collates: Mapping[str, Collate | None]  # by the same names
    augment: Augment | None
    order: Order | None
    sampling: EpochRows | None
    threads: int  # intra-op
    computing: Computing
