"""Verdicts: from what a doctor found to what would go wrong, and what helps. Pure.

A run is one process per CPU worker (shared memory between them), or a thread per GPU. What it needs
was measured on Linux with torch 2.13: descriptors and memory of a coordinator and its workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from quorate.commands.doctor.facts import Accelerator, Facts, Gpu
from quorate.machine import descriptors
from quorate.machine.devices import MOST_CPU_WORKERS
from quorate.machine.visible_devices import VARIABLE

MIB = 1 << 20
FAILS, BEWARE = "fails", "beware"

FILES = 11 + descriptors.SPARE  # without those for workers
# Loader processes hand over each tensor as a descriptor.
FILES_WITH_LOADERS = 256
# Of a small model: 222 MiB and 55 per worker.
MEMORY_BYTES, MEMORY_PER_WORKER_BYTES = 256 * MIB, 64 * MIB
# Batches of loader processes: below the first nothing goes, the second is a container's default.
SHM_LEAST_BYTES, SHM_SMALL_BYTES = 16 * MIB, 256 * MIB
CONTEXT_BYTES = 512 * MIB  # that CUDA takes on a GPU before any tensor
TEMPORARY_LEAST_BYTES = 16 * MIB


class Wanted(NamedTuple):
    """The run that is to be judged; what is None is chosen as ``quorate run`` does."""

    devices: tuple[str, ...] | None = None
    workers: int | None = None
    threads: int = 1
    loader_workers: int | None = None  # None: there may be some


class Verdict(NamedTuple):
    """One thing that is wrong."""

    level: str  # FAILS: such a run would fail or hang; BEWARE: it would not do what one may expect
    subject: str
    what: str  # with the figure
    cure: str


def verdicts(facts: Facts, wanted: Wanted) -> list[Verdict]:
    """What is wrong, the worst first; an empty list if nothing is."""
    chosen = _chosen(facts, wanted)
    workers = _workers(facts, wanted, chosen)
    found = [
        *_torch(facts, wanted),
        *_driver(facts, wanted),
        *_missing(facts, wanted),
        *_hidden(facts),
        *_devices(facts, chosen),
        *_cores(facts, wanted, chosen, workers),
        *_memory(facts, chosen, workers),
        *_shared_memory(facts, wanted, chosen),
        *_files(facts, 0 if chosen or workers == 1 else workers),
        *_temporary(facts, wanted),
        *_network(facts),
    ]
    return sorted(found, key=lambda verdict: verdict.level != FAILS)


def _chosen(facts: Facts, wanted: Wanted) -> list[Accelerator]:
    """The accelerators that the run would use; none: it would use the CPU."""
    names = wanted.devices
    if names is None:
        return [a for a in facts.accelerators if a.device.startswith("cuda")]
    return [
        a for a in facts.accelerators if a.device in names or a.device.partition(":")[0] in names
    ]


def _workers(facts: Facts, wanted: Wanted, chosen: Sequence[Accelerator]) -> int:
    if wanted.workers is not None:
        return wanted.workers
    if wanted.devices is not None:
        return max(1, len(chosen) + wanted.devices.count("cpu"))
    return len(chosen) or _cpu_workers(facts)


def _cpu_workers(facts: Facts) -> int:
    return max(1, min(int(facts.host.cores_usable), MOST_CPU_WORKERS))


# --- torch and its devices ------------------------------------------------------------------------


def _torch(facts: Facts, wanted: Wanted) -> Iterator[Verdict]:
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


def _driver(facts: Facts, wanted: Wanted) -> Iterator[Verdict]:
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


def _missing(facts: Facts, wanted: Wanted) -> Iterator[Verdict]:
    """Devices that are asked for by name and are not there."""
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
            yield Verdict(FAILS, name, why_no_gpu(facts), "see the other lines; or --devices cpu")
        else:
            yield Verdict(
                FAILS,
                name,
                f"torch {facts.torch.version} sees no such device here",
                "check the spelling, or install a build of torch for it",
            )


def why_no_gpu(facts: Facts) -> str:
    """Why torch sees no GPU, from the nearest cause to the farthest."""
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


def _hidden(facts: Facts) -> Iterator[Verdict]:
    """GPUs that are there and not visible, and what the variable's value does."""
    value, selection = facts.environment.get(VARIABLE), facts.selection
    seen = {visible.index for visible in selection.visible}
    hidden = [gpu.index for gpu in facts.gpus if gpu.index not in seen]
    cure = f"unset {VARIABLE}, or name those that are wanted: {VARIABLE}=0,1"
    if value is None:
        if selection.remark is not None:
            yield Verdict(BEWARE, "GPUs", selection.remark, "see NVIDIA's MIG user guide")
    elif not selection.visible:
        if selection.remark is None:
            return
        what = f"{VARIABLE}={value!r}: {selection.remark}"
        if facts.gpus:
            what += f": {len(facts.gpus)} are hidden, and a run uses the CPU"
        yield Verdict(BEWARE, "GPUs", what, cure)
    elif selection.remark is not None:
        yield Verdict(BEWARE, "GPUs", f"{VARIABLE}={value!r}: {selection.remark}", cure)
    elif hidden:
        listed = ", ".join(map(str, hidden))
        what = f"{VARIABLE}={value!r} hides {len(hidden)} of {len(facts.gpus)}: physical {listed}"
        yield Verdict(BEWARE, "GPUs", what, cure)
    names = {gpu.name for gpu in facts.gpus}
    if (
        value is not None
        and value[:1].isdigit()
        and len(names) > 1
        and facts.environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    ):
        yield Verdict(
            BEWARE,
            "GPUs",
            "they are of several kinds, and without CUDA_DEVICE_ORDER=PCI_BUS_ID an index in "
            f"{VARIABLE} is CUDA's, the fastest first, and not nvidia-smi's",
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or use UUIDs",
        )


def _devices(facts: Facts, chosen: Sequence[Accelerator]) -> Iterator[Verdict]:
    gpus = {gpu.index: gpu for gpu in facts.gpus}
    used: list[Gpu] = []
    for accelerator in chosen:
        if accelerator.error is not None:
            yield Verdict(
                FAILS,
                accelerator.device,
                f"torch cannot compute on it: {accelerator.error}",
                f"install a build of torch for it, free it, or leave it out with {VARIABLE}",
            )
        if accelerator.visible is not None and accelerator.visible.index in gpus:
            gpu = gpus[accelerator.visible.index]
            used.append(gpu)
            yield from _gpu(accelerator.device, gpu)
    indices = {gpu.index for gpu in used}
    for link in facts.links:
        if link.is_direct is False and {link.one, link.other} <= indices:
            yield Verdict(
                BEWARE,
                f"GPUs {link.one}, {link.other}",
                f"neither reads the other's memory ({link.kind}): gradients go through the host's",
                "nothing needs to be done; GPUs with a direct link exchange faster",
            )


def _gpu(device: str, gpu: Gpu) -> Iterator[Verdict]:
    if gpu.compute_mode == "prohibited":
        yield Verdict(
            FAILS,
            device,
            "its compute mode is prohibited",
            f"nvidia-smi -i {gpu.index} -c DEFAULT",
        )
    if gpu.compute_mode == "exclusive":
        yield Verdict(
            FAILS if gpu.holders else BEWARE,
            device,
            f"its compute mode lets one process use it, and {len(gpu.holders)} do",
            f"one worker on it, nobody else; or nvidia-smi -i {gpu.index} -c DEFAULT",
        )
    if gpu.memory_bytes is None or not gpu.memory_total_bytes:
        return
    free = gpu.memory_total_bytes - gpu.memory_bytes
    if gpu.memory_bytes > gpu.memory_total_bytes / 2 or free < CONTEXT_BYTES:
        held = ", ".join(
            f"process {h.pid}"
            + (f" ({h.name})" if h.name else "")
            + ("" if h.memory_bytes is None else f" {h.memory_bytes / MIB:,.0f} MiB")
            for h in gpu.holders
        )
        yield Verdict(
            FAILS if free < CONTEXT_BYTES else BEWARE,
            device,
            f"{free / MIB:,.0f} of {gpu.memory_total_bytes / MIB:,.0f} MiB are free; held by "
            + (held or "processes that cannot be seen from here"),
            f"end those, wait for them, or leave it out with {VARIABLE}; "
            "--memory-fraction bounds what our own workers take",
        )


# --- the host -------------------------------------------------------------------------------------


def _cores(
    facts: Facts, wanted: Wanted, chosen: Sequence[Accelerator], workers: int
) -> Iterator[Verdict]:
    host = facts.host
    usable = f"{host.cores_usable:g}"
    by_itself = f"CPU workers that a run starts by itself: {_cpu_workers(facts)}; for more, "
    if host.cores_limit is not None and host.cores_limit < min(host.cores_allowed, host.cores):
        yield Verdict(
            BEWARE,
            "cores",
            f"the container may use the time of {host.cores_limit:g} of {host.cores} cores "
            "(cpu.max, cfs_quota_us): whoever starts a thread per core is stopped for the rest "
            "of each period",
            by_itself + "raise the limit (docker --cpus)",
        )
    if host.cores_allowed < host.cores:
        yield Verdict(
            BEWARE,
            "cores",
            f"this process may run on {host.cores_allowed} of {host.cores} cores (affinity: "
            "taskset, cpuset)",
            by_itself + "let it have more (docker --cpuset-cpus, taskset)",
        )
    if not chosen and workers * wanted.threads > max(1.0, host.cores_usable):
        yield Verdict(
            BEWARE,
            "cores",
            f"{workers} workers x {wanted.threads} threads on {usable} cores: they wait for one "
            "another",
            "fewer --workers or --threads",
        )


def _memory(facts: Facts, chosen: Sequence[Accelerator], workers: int) -> Iterator[Verdict]:
    host, limits = facts.host, facts.limits
    known = [b for b in (host.container_free_bytes, host.memory_free_bytes) if b is not None]
    free = min(known, default=None)
    if host.memory_free_bytes is None:
        yield Verdict(
            FAILS,
            "memory",
            "how much there is cannot be told: /proc is not there, and a run reads it",
            "mount -t proc proc /proc",
        )
    need = MEMORY_BYTES + (0 if chosen else workers * MEMORY_PER_WORKER_BYTES)
    if free is not None and free < need:
        whose = "of the machine" if free == host.memory_free_bytes else "to the container"
        yield Verdict(
            FAILS,
            "memory",
            f"{free / MIB:,.0f} MiB are left {whose}, and {workers} workers take "
            f"{need / MIB:,.0f} MiB with the smallest of models",
            "end other programs, raise the container's limit, or fewer --workers",
        )
    if limits.address_bytes is not None and limits.address_bytes < 16 * 1024 * MIB:
        yield Verdict(
            BEWARE,
            "memory",
            f"addresses of a process are limited to {limits.address_bytes / MIB:,.0f} MiB "
            "(ulimit -v), which counts what is mapped and never touched",
            "ulimit -v unlimited",
        )


def _shared_memory(
    facts: Facts, wanted: Wanted, chosen: Sequence[Accelerator]
) -> Iterator[Verdict]:
    limits = facts.limits
    if limits.segment_error is not None:
        what = limits.segment_error.removeprefix("shared memory: ").partition(";")[0]
        if limits.file_bytes is not None:
            limit = f"{limits.file_bytes / MIB:,.1f} MiB"
            what += f"; files, and it counts as one, are limited to {limit} (ulimit -f)"
        yield Verdict(
            BEWARE if chosen else FAILS,
            "shared memory",
            f"for workers: {what}",
            "ulimit -f unlimited; or --engine towers, which needs none",
        )
    if wanted.loader_workers == 0 or limits.shm_bytes is None:
        return
    if limits.shm_free_bytes is None or not limits.shm_is_writable:
        yield Verdict(
            FAILS,
            "shared memory",
            "/dev/shm cannot be written to: loader processes hand over rows there",
            "mount it (mode 1777), or loader_workers=0",
        )
        return
    figure = (
        f"{limits.shm_free_bytes / MIB:,.1f} of {limits.shm_bytes / MIB:,.1f} MiB are free in "
        "/dev/shm: each loader process has two shards' rows there"
    )
    cure = "docker --shm-size 8g, or mount -o remount,size=8g /dev/shm; or loader_workers=0"
    if limits.shm_free_bytes < SHM_LEAST_BYTES:
        yield Verdict(
            FAILS,
            "shared memory",
            f"{figure}, and a run whose rows do not fit is refused",
            cure,
        )
    elif limits.shm_free_bytes < SHM_SMALL_BYTES:
        yield Verdict(BEWARE, "shared memory", f"{figure}, which images may well fill", cure)


def _files(facts: Facts, processes: int) -> Iterator[Verdict]:
    limit, most = facts.limits.files, facts.limits.files_most
    if limit is None:
        return
    need = FILES + descriptors.PER_WORKER * processes
    needs = f"a run needs {need}"
    if processes:
        needs += f" ({descriptors.PER_WORKER} for each of {processes} worker processes)"
    may = f"a process may open {limit:,} files (ulimit -n)"
    higher = "unlimited" if most is None else f"{most:,}"
    wanted = max(4096, need)
    cure = f"ulimit -n {wanted if most is None else min(most, wanted)} (the most is {higher})"
    if most is not None and most < max(FILES_WITH_LOADERS, need):
        cure = (
            f"the most is {higher}: raise it in /etc/security/limits.conf, docker --ulimit nofile"
        )
    if limit < need:
        yield Verdict(FAILS, "descriptors", f"{may}, and {needs}", cure)
    elif limit < FILES_WITH_LOADERS:
        yield Verdict(
            BEWARE,
            "descriptors",
            f"{may}: {needs}, and loader processes take one more per tensor",
            cure,
        )


def _temporary(facts: Facts, wanted: Wanted) -> Iterator[Verdict]:
    limits = facts.limits
    free = limits.temporary_free_bytes
    if limits.temporary_error is not None:
        yield Verdict(
            FAILS,
            "temporary folder",
            f"{limits.temporary} cannot be written to: {limits.temporary_error}",
            "set TMPDIR to a folder that can",
        )
    elif free is not None and free < TEMPORARY_LEAST_BYTES:
        yield Verdict(
            BEWARE,
            "temporary folder",
            f"{free / MIB:,.1f} MiB are free in {limits.temporary}",
            "set TMPDIR to a folder with more room",
        )
    if limits.sockets_error is not None and wanted.loader_workers != 0:
        yield Verdict(
            FAILS if wanted.loader_workers else BEWARE,
            "temporary folder",
            limits.sockets_error.removeprefix("the temporary folder: ").partition(";")[0],
            "set TMPDIR to a shorter one, or loader_workers=0",
        )


def _network(facts: Facts) -> Iterator[Verdict]:
    names = [interface.name for interface in facts.interfaces]
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = facts.environment.get(variable, "")
        if not value or value.startswith("^"):
            continue
        wanted = [name.strip().removeprefix("=") for name in value.split(",")]
        if not any(name.startswith(prefix) for prefix in wanted for name in names):
            yield Verdict(
                BEWARE,
                "interfaces",
                f"{variable}={value!r} fits none that is up ({', '.join(names)})",
                f"unset it, or name one of them: {variable}={names[-1] if names else 'eth0'}",
            )
