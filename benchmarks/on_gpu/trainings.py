"""Trainings by quorate: how fast, with which bits, in how much memory, and after a kill."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import torch
from seed_network import WARM_UP, data, loss, timed, void
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from on_gpu.loops import synchronize
from on_gpu.works import WORKS
from quorate.replica.digest import digest

MIB = 1 << 20
SHARDS = 4


def trainer(name: str, **options: Any) -> quorate.Trainer:
    """Of a work."""
    work = WORKS[name]
    settings = {"batch_size": work.rows, "loss": work.loss} | options
    return quorate.Trainer(work.network, optimizer=work.optimizer, **settings)


def with_quorate(name: str, device: torch.device, precision: str, how: str, steps: int) -> float:
    """Examples per second of one tower."""
    work = WORKS[name]
    one = trainer(
        name,
        devices=str(device),
        shards=1,
        precision=precision,
        compute=quorate.Compute(compile=how == "compile"),
    )
    updates = one.updates(TensorDataset(*work.tensors()), steps=WARM_UP + steps)

    def wait() -> None:
        synchronize(device)

    try:
        return timed(lambda: void(next(updates).loss), work.rows, steps, wait, wait)
    finally:
        updates.close()


def bits(name: str, device: torch.device, steps: int, **options: Any) -> str:
    """The digest after so many updates."""
    workers = quorate.Workers(options.pop("workers"), engine=options.pop("engine"))
    compute = quorate.Compute(compile=options.pop("compile", False))
    settings = {"devices": str(device), "workers": workers, "compute": compute} | options
    one = trainer(name, shards=SHARDS, **settings)
    for _ in one.updates(TensorDataset(*WORKS[name].tensors()), steps=steps):
        pass
    return of(one)


def of(one: quorate.Trainer) -> str:
    """The digest of what a trainer has trained."""
    return digest(one.model.state_dict().items())


def killed(name: str, device: torch.device, steps: int) -> dict[str, Any]:
    """Kill one of two worker processes with signal 9 and go on until there are two again.

    The digest is that after ``steps`` updates; seconds from the kill to the next update, and to an
    update to which the new process has brought a shard.
    """
    one = trainer(
        name, devices=str(device), workers=quorate.Workers(2, engine="processes"), shards=SHARDS
    )
    found: dict[str, Any] = {}
    at, old = 0.0, 0
    begun: int | None = None  # shards of the new process when it was first seen

    def kill() -> None:
        nonlocal at
        at = time.monotonic()
        os.kill(old, signal.SIGKILL)

    dataset = TensorDataset(*WORKS[name].tensors())
    for number, _ in enumerate(one.updates(dataset, steps=10**9), start=1):
        now = time.monotonic()
        victim = one.workers[1]
        if number == steps // 2:
            assert victim.pid is not None
            old = victim.pid
            threading.Timer(0.01, kill).start()  # while a shard is computed
        if at and "next_s" not in found:
            found["next_s"] = now - at
        if number == steps:
            found["digest"] = of(one)
        if at and victim.pid not in (None, old) and "back_s" not in found:
            begun = victim.shards if begun is None else begun
            if victim.shards > begun:
                found["back_s"] = now - at
        if "back_s" in found and "digest" in found:
            break
    return found


def bounded(
    device: torch.device, steps: int, fraction: float, workers: int, rows: int
) -> dict[str, Any]:
    """Worker processes with a bound on memory; ``rows`` of them fit, or do not."""
    total = 0
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory

    def watched(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Any]:
        found: dict[str, Any] = dict(loss(model, batch))
        if total:
            found["reserved_mib"] = torch.cuda.max_memory_reserved(device) / MIB
        return found

    one = trainer(
        "seed",
        loss=watched,
        batch_size=rows,
        shards=workers,
        devices=str(device),
        workers=quorate.Workers(workers, engine="processes", memory_fraction=fraction),
    )
    images, labels = data()
    times = -(-rows // len(images))
    dataset = TensorDataset(images.repeat(times, 1, 1, 1), labels.repeat(times))
    most = 0.0
    try:
        for report in one.updates(dataset, steps=steps):
            most = max(most, report.metrics.get("reserved_mib", 0.0))
    except Exception as error:
        said = [str(error), *getattr(error, "__notes__", [])]
        notes = [each for each in said if "quorate: out of memory" in each]
        if not notes and not isinstance(error, torch.OutOfMemoryError):
            raise
        return {"error": type(error).__name__, "note": notes[0] if notes else None}
    return {"reserved_mib": most, "bound_mib": fraction * total / MIB}
