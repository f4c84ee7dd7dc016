"""Roles of the processes that measure: speed and memory, a digest, a kill, the machine.

A process gets its role as a ``Job`` and prints lines of JSON.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from protocol import ALONE, serve, start_ranks

import quorate
from on_gpu import loops
from on_gpu.job import Job
from on_gpu.networks import network
from quorate.replica.digest import digest

MIB = 1 << 20
WARM_UPS = 5  # steps; whatever is compiled or recorded is so by then
SHARDS = 4  # of a training whose digest is taken
NOT_COMPILED = ("compile is off", "without a CUDA graph")
SETTLED = 5  # updates before the kill


class NotCompiledError(Exception):
    """quorate was to compile, and computed otherwise; the message says why."""


def measure_speed(job: Job) -> None:
    """Make rounds of steps whenever told so, and say how fast they were, and the memory."""
    net = network(job.network, is_quick=job.is_quick)
    devices = [torch.device(name) for name in job.devices]
    ranks, rows = ALONE, net.rows * len(devices)
    if job.engine == "loop":
        deterministic = job.deterministic
        step = loops.by_hand(net, devices[0], job.how, job.precision, deterministic=deterministic)
    elif job.engine == "ddp":
        require_devices(devices)  # a rank without its device would leave the others waiting
        ranks, rows = start_ranks(len(devices), connected=True), net.rows
        step = loops.by_ddp(net, devices[ranks.rank], job.how, job.precision)
    else:
        said = listen()
        updates = loops.updates(net, loops.trainer(net, job, shards=job.workers))

        def step() -> float:
            require_compiled(said)
            return float(next(updates).loss)

    def finish() -> dict[str, Any]:
        used = [device for device in devices if device.type != "cpu"]
        for device in used:
            torch.accelerator.synchronize(device)
        reserved = [torch.accelerator.max_memory_reserved(device) for device in used]
        in_one_process = job.engine in ("loop", "towers")
        return {"memory_mib": max(reserved) / MIB if reserved and in_one_process else None}

    for _ in range(WARM_UPS):
        step()
    finish()
    serve(rows, step, ranks=ranks, finish=finish)


def take_digest(job: Job) -> dict[str, Any]:
    """Train, and return the digest of what was trained."""
    net, said = network(job.network, is_quick=job.is_quick), listen()
    trainer = loops.trainer(net, job, shards=SHARDS)
    for _ in loops.updates(net, trainer, job.updates):
        require_compiled(said)
    return {"digest": digest(trainer.model.state_dict().items())}


def kill_worker(job: Job) -> dict[str, Any]:
    """Kill one of two worker processes with signal 9, and train until there are two again.

    Returns:
        The digest after ``job.updates``, and seconds from the kill to the next update and to an
        update to which the new process brought a shard.
    """
    net = network(job.network, is_quick=job.is_quick)
    trainer = loops.trainer(net, job, shards=SHARDS)
    found: dict[str, Any] = {}
    killed_at, victim = 0.0, -1
    shards_at_first: int | None = None  # of the new process

    def kill() -> None:
        nonlocal killed_at
        killed_at = time.monotonic()
        os.kill(victim, signal.SIGKILL)

    for number, _ in enumerate(loops.updates(net, trainer), start=1):
        now, worker = time.monotonic(), trainer.workers[1]
        if number == SETTLED:
            assert worker.pid is not None
            victim = worker.pid
            threading.Timer(0.01, kill).start()  # while a shard is computed
        if killed_at:
            found.setdefault("next_update_s", now - killed_at)
        if number == job.updates:
            found["digest"] = digest(trainer.model.state_dict().items())
        if killed_at and worker.pid not in (None, victim):
            shards_at_first = worker.shards if shards_at_first is None else shards_at_first
            if worker.shards > shards_at_first:
                found.setdefault("both_again_s", now - killed_at)
        if {"both_again_s", "digest"} <= found.keys():
            break
    return found


def name_machine(job: Job) -> dict[str, Any]:
    """Return what is measured on."""
    found = {"torch": torch.__version__, "quorate": quorate.__version__}
    names = [torch.device(name) for name in job.devices]
    if any(device.type != "cuda" for device in names):
        return {"device": f"{', '.join(job.devices)}: no GPU", **found}
    cards = [torch.cuda.get_device_properties(device) for device in names]
    found["device"] = ", ".join(
        f"{each.name}, {each.total_memory / MIB:,.0f} MiB" for each in cards
    )
    cudnn: Any = torch.backends.cudnn
    found |= {"cuda": str(torch.version.cuda), "cudnn": str(cudnn.version())}
    if shutil.which("nvidia-smi"):
        words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        ended = subprocess.run(words, capture_output=True, text=True, check=False)
        found["driver"] = ended.stdout.partition("\n")[0]
    return found


ROLES: dict[str, Callable[[Job], dict[str, Any] | None]] = {
    "speed": measure_speed,
    "digest": take_digest,
    "kill": kill_worker,
    "machine": name_machine,
}


def require_devices(devices: list[torch.device]) -> None:
    """Go on if this machine has all these devices.

    Raises:
        ValueError: it does not.
    """
    for device in devices:
        if device.type != "cpu" and device.index >= torch.accelerator.device_count():
            raise ValueError(f"got {device}; this machine has no such device")


def listen() -> list[str]:
    """Return a list to which the lines are added in which quorate says that it does not compile."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if any(words in record.getMessage() for words in NOT_COMPILED):
                said.append(record.getMessage())

    logging.getLogger("quorate").addHandler(Listener())
    return said


def require_compiled(said: list[str]) -> None:
    """Go on if nothing was said.

    Raises:
        NotCompiledError: quorate computes otherwise than the figure would claim.
    """
    if said:
        raise NotCompiledError(said[0].removeprefix("quorate: "))
