"""Facts: the description of a run in a checkpoint, beside tensors. A resume compares facts."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch

from quorate.coordination.plan import Plan
from quorate.machine.processor import processors
from quorate.training.crew import Crew
from quorate.training.state import State


def facts_of(
    crew: Crew, state: State, plan: Plan, row_sample: Mapping[str, str | None] | None
) -> dict[str, Any]:
    """Return the facts, for JSON.

    Args:
        row_sample: hashes of some rows of the dataset, where checkpoints are saved.
    """
    return {
        "epoch": state.global_step // plan.steps_per_epoch,
        **crew.recipe.facts(),
        # Facts found at run time: no settings, or settings that were adjusted.
        "shards": plan.shards,
        "rows": plan.rows,
        "shuffle": plan.shuffle,
        "order_sha256": getattr(plan.order, "sha256", None),
        "sampled_rows": None if plan.sampling is None else plan.dealt_rows,
        "last_step": plan.course.last_step,
        "progress": "progress" in plan.course.asked,
        "row_sample": row_sample,
        "compile": crew.replicas.computing.compile,
        "deterministic": crew.replicas.computing.deterministic,
        "kernels": crew.replicas.computing.kernels,
        "random": crew.replicas.computing.random,
        **({} if plan.round is None else {"round": plan.round.to_json()}),
        **state.phases.facts(),
        "engine": crew.engine,
        "devices": sorted({str(group) for group in crew.groups}),
        "device_types": sorted({device.type for device in crew.devices}),
        "processors": processors(crew.devices),
        "workers": len(crew.groups),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "account": state.account(),
        "doubts": crew.replicas.notes.doubts,
    }
