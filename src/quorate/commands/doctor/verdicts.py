"""Verdicts: from the findings of a doctor to the expected problems, and remedies. Pure.

A run is one process per CPU worker (with shared memory between them), or a thread per GPU. The
needs of a run were measured on Linux with torch 2.13: descriptors and memory of a coordinator and
its workers.
"""

from __future__ import annotations

from quorate.commands.doctor import gpu_verdicts, host_verdicts, limit_verdicts, torch_verdicts
from quorate.commands.doctor.facts import Facts
from quorate.commands.doctor.verdict import FAILS, Verdict
from quorate.commands.doctor.wanted import Wanted, accelerators, number_of_workers


def verdicts(facts: Facts, wanted: Wanted) -> list[Verdict]:
    """Return the problems, the worst first; an empty list if there are none."""
    chosen = accelerators(facts, wanted)
    workers = number_of_workers(facts, wanted, chosen)
    listed = [
        *torch_verdicts.on_torch(facts, wanted),
        *torch_verdicts.on_driver(facts, wanted),
        *torch_verdicts.on_missing_devices(facts, wanted),
        *gpu_verdicts.on_hidden_gpus(facts),
        *gpu_verdicts.on_devices(facts, chosen),
        *host_verdicts.on_cores(facts, wanted, chosen, workers),
        *host_verdicts.on_memory(facts, chosen, workers),
        *limit_verdicts.on_shared_memory(facts, chosen),
        *limit_verdicts.on_descriptors(facts, 0 if chosen or workers == 1 else workers),
        *limit_verdicts.on_temporary_folder(facts),
        *host_verdicts.on_interfaces(facts),
    ]
    return sorted(listed, key=lambda verdict: verdict.level != FAILS)
