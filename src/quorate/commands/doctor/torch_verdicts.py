"""Verdicts on torch, on NVIDIA's driver, and on missing devices. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from quorate.commands.doctor.facts import Facts
from quorate.commands.doctor.verdict import BEWARE, FAILS, Verdict
from quorate.commands.doctor.wanted import Wanted
from quorate.machine.visible_devices import VARIABLE


def on_torch(facts: Facts, wanted: Wanted) -> Iterator[Verdict]:
    """Judge whether torch can be imported, and answers."""
    torch = facts.torch
    if torch.version is None and torch.failure is not None:
        yield Verdict(
            FAILS,
            "torch",
            f"it cannot be imported: {torch.failure}",
            "install it again: pip install torch",
        )
    elif torch.failure is not None:
        yield Verdict(
            BEWARE if wanted.devices == ("cpu",) else FAILS,
            "torch",
            f"{torch.failure}: a run that uses it would hang or end",
            "see what the system's log (dmesg) says of the device; --devices cpu does without",
        )


def on_driver(facts: Facts, wanted: Wanted) -> Iterator[Verdict]:
    """Judge NVIDIA's driver: lost or idle GPUs, a hanging or missing driver."""
    driver, torch = facts.driver, facts.torch
    for index, error in facts.lost.items():
        yield Verdict(
            BEWARE,
            f"GPU {index}",
            f"the driver lists it and cannot reach it: {error}",
            "reset it (nvidia-smi --gpu-reset) or restart the machine",
        )
    if driver.failure is None:
        if torch.version is not None and facts.gpus and torch.cuda is None and torch.hip is None:
            yield Verdict(
                BEWARE,
                "torch",
                f"{len(facts.gpus)} GPUs are idle: torch {torch.version} is built without CUDA",
                f"install a build for CUDA {driver.cuda} or older (download.pytorch.org/whl)",
            )
        return
    hangs = driver.failure.startswith("no answer")
    on_cpu = wanted.devices == ("cpu",) or (torch.cuda is None and wanted.devices is None)
    if hangs:
        yield Verdict(
            BEWARE if on_cpu else FAILS,
            "driver",
            f"{driver.failure}: a run on GPUs would hang too",
            "see whether nvidia-smi answers; slow GPUs want persistence mode (nvidia-smi -pm 1), "
            "hung ones a restart; --devices cpu does without",
        )
    elif torch.cuda is not None:
        yield Verdict(
            BEWARE,
            "driver",
            f"torch {torch.version} is built with CUDA {torch.cuda}, and there is no driver to "
            f"use: {driver.failure}",
            "install NVIDIA's driver; start a container with --gpus all",
        )


def on_missing_devices(facts: Facts, wanted: Wanted) -> Iterator[Verdict]:
    """Judge requested devices that are missing."""
    if facts.torch.version is None:  # then torch reports no device at all: one verdict is enough
        return
    for name in wanted.devices or ():
        kind, _, index = name.partition(":")
        if kind == "cpu":
            continue
        there = [a.device for a in facts.accelerators if a.device.partition(":")[0] == kind]
        if (index and name in there) or (not index and there):
            continue
        if there:
            yield Verdict(
                FAILS, name, f"there are {there[0]} to {there[-1]}", "name one that exists"
            )
        elif kind == "cuda":
            yield Verdict(FAILS, name, _why_no_gpu(facts), "see the other lines; or --devices cpu")
        else:
            yield Verdict(
                FAILS,
                name,
                f"torch {facts.torch.version} sees no such device here",
                "check the spelling, or install a build of torch for it",
            )


def _why_no_gpu(facts: Facts) -> str:
    """Return why torch sees no GPU: the nearest cause first."""
    reasons = []
    if facts.torch.cuda is None and facts.torch.hip is None:
        reasons.append(f"torch {facts.torch.version} is built without CUDA")
    value = facts.environment.get(VARIABLE)
    if value is not None and not facts.selection.visible and facts.selection.remark:
        reasons.append(f"{VARIABLE}={value!r}: {facts.selection.remark}")
    if facts.driver.failure is not None:
        reasons.append(f"the driver: {facts.driver.failure}")
    elif not facts.gpus:
        reasons.append("the driver knows no GPU")
    if facts.torch.why_none is not None:
        reasons.append(f"torch says: {facts.torch.why_none}")
    return "torch sees no GPU: " + "; ".join(reasons or ["nothing says why"])
