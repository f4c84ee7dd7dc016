"""The facts of a run, saved in each checkpoint: settings, data, workers and software.

A resume compares the facts: some must be equal, others are reported as a reason for different bits
(``resume.py``, ``services/checkpoints/record.py``).
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch

from quorate.coordination.plan import Plan
from quorate.machine.processor import processors
from quorate.training.state import State
from quorate.training.worker_group import WorkerGroup


def facts_of(
    workers: WorkerGroup, plan: Plan, state: State, row_sample: Mapping[str, str | None] | None
) -> dict[str, Any]:
    """Return the facts of a run at present, for JSON.

    Args:
        row_sample: hashes of a few rows, to recognise the dataset; None without a run directory.
    """
    computing = workers.replicas.computing
    return {
        "epoch": state.global_step // plan.steps_per_epoch,
        **workers.config.facts(),
        # Facts found at run time: no settings, or settings that were adjusted.
        "shards": plan.shards,
        "rows": plan.rows,
        "shuffle": plan.shuffle,
        "order_sha256": getattr(plan.order, "sha256", None),
        "sampled_rows": None if plan.sampling is None else plan.dealt_rows,
        "last_step": plan.course.last_step,
        "progress": "progress" in plan.course.asked,
        "row_sample": row_sample,
        "compile": computing.compile,
        "deterministic": computing.deterministic,
        "kernels": computing.kernels,
        "random": computing.random,
        **({} if plan.round is None else {"round": plan.round.to_json()}),
        **state.phases.facts(),
        "engine": workers.engine,
        "devices": sorted({str(group) for group in workers.groups}),
        "device_types": sorted({device.type for device in workers.devices}),
        "processors": processors(workers.devices),
        "workers": len(workers.groups),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "account": state.account(),
        "doubts": workers.replicas.notes.doubts,
    }
