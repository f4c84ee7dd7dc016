"""The output of a doctor: whether a run would work, a row per fact, then the problems."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from quorate.commands.doctor.facts import Facts, Gpu
from quorate.commands.doctor.verdict import FAILS, Verdict
from quorate.machine.text import aligned

GIB = 1 << 30
MIB = 1 << 20
WIDTH = 100


class Row(NamedTuple):
    """One line of the table."""

    subject: str
    text: str


def shown(facts: Facts, verdicts: Sequence[Verdict]) -> str:
    """Return the whole text for one machine."""
    rows = [*_gpus(facts), *_torch(facts), *_host(facts), *_limits(facts), *_network(facts)]
    return text(rows, verdicts)


def text(rows: Sequence[Row], verdicts: Sequence[Verdict]) -> str:
    """Return rows and verdicts as text; a subject with several rows is shown once."""
    before = ["", *(row.subject for row in rows)]
    table = aligned(
        [
            ("" if row.subject == subject else row.subject, row.text)
            for subject, row in zip(before, rows, strict=False)
        ]
    )
    wrong = [*_verdicts(verdicts)]
    return "\n".join([_conclusion(verdicts), "", table, *(["", *wrong] if wrong else [])])


def _conclusion(verdicts: Sequence[Verdict]) -> str:
    fails = sum(verdict.level == FAILS for verdict in verdicts)
    if fails:
        reasons = "1 reason" if fails == 1 else f"{fails} reasons"
        return f"a run would fail here, for {reasons}: see 'fails' at the end"
    if verdicts:
        return "a run would work here; see 'beware' at the end"
    return "a run would work here: nothing is wrong"


def _verdicts(verdicts: Sequence[Verdict]) -> Iterator[str]:
    for level, subject, what, cure in verdicts:
        indent = " " * 8
        for begin, line in (("", f"{level:7} {subject}: {what}"), (indent, f"fix: {cure}")):
            yield from textwrap.wrap(line, WIDTH, initial_indent=begin, subsequent_indent=indent)


# --- devices --------------------------------------------------------------------------------------


def _gpus(facts: Facts) -> Iterator[Row]:
    driver = facts.driver
    if driver.version is not None:
        newest = "" if driver.cuda is None else f", for CUDA up to {driver.cuda}"
        yield Row("driver", f"{driver.version}{newest}")
    if driver.failure is not None:
        yield Row("driver", f"no NVIDIA GPU found: {driver.failure}")
    for gpu in facts.gpus:
        yield Row("GPUs", _gpu(gpu))
        for holder in gpu.holders:
            name = holder.name or "in another container, or ended"
            memory = (
                "" if holder.memory_bytes is None else f", {holder.memory_bytes / MIB:,.0f} MiB"
            )
            yield Row("GPUs", f"    held by process {holder.pid} ({name}){memory}")
        for part in gpu.slices:
            yield Row("GPUs", f"    slice {part.uuid}")
    for index, error in facts.lost.items():
        yield Row("GPUs", f"physical {index}: {error}")
    for link in facts.links:
        direct = {True: "direct", False: "through the host", None: "maybe not direct"}
        yield Row("links", f"{link.one} - {link.other}: {link.kind}, {direct[link.is_direct]}")
    for accelerator in facts.accelerators:
        what = "" if accelerator.visible is None else f" = {accelerator.visible}"
        state = (
            "computes" if accelerator.error is None else f"does not compute: {accelerator.error}"
        )
        yield Row("visible", f"{accelerator.device}{what}: {state}")
    if not facts.accelerators:
        for number, visible in enumerate(facts.selection.visible):
            yield Row("visible", f"cuda:{number} = {visible}: torch does not see it")
    for name, value in facts.environment.items():
        yield Row("environment", f"{name}={value!r}")


def _gpu(gpu: Gpu) -> str:
    parts = [f"physical {gpu.index} = {gpu.uuid}  {gpu.name or 'unknown model'}"]
    if gpu.memory_bytes is not None and gpu.memory_total_bytes is not None:
        used, total = gpu.memory_bytes / GIB, gpu.memory_total_bytes / GIB
        parts.append(f"{used:.1f} of {total:.1f} GiB in use")
    if gpu.use is not None:
        parts.append(f"busy {gpu.use:.0%}")
    if gpu.compute_mode not in (None, "shared"):
        parts.append(f"compute mode {gpu.compute_mode}")
    if gpu.nvlinks:
        parts.append(f"{gpu.nvlinks} NVLinks")
    if gpu.is_cut:
        parts.append(f"cut into {len(gpu.slices)} slices (MIG)")
    return ", ".join(parts)


def _torch(facts: Facts) -> Iterator[Row]:
    torch = facts.torch
    if torch.version is None:
        yield Row("torch", f"none: {torch.failure}")
        return
    built = [f"CUDA {torch.cuda}" if torch.cuda else "", f"ROCm {torch.hip}" if torch.hip else ""]
    parts = [torch.version, *(f"built with {toolkit}" for toolkit in built if toolkit)]
    if not any(built):
        parts.append("built without CUDA")
    if torch.accelerator not in (None, "cuda"):
        parts.append(f"accelerator {torch.accelerator}")
    if torch.cudnn is not None:
        parts.append(f"cuDNN {torch.cudnn}")
    if torch.mkldnn:
        parts.append("oneDNN")
    parts += [name for name, there in (("NCCL", torch.nccl), ("gloo", torch.gloo)) if there]
    parts.append(f"{torch.threads} threads by default")
    yield Row("torch", ", ".join(parts))


# --- the host -------------------------------------------------------------------------------------


def _host(facts: Facts) -> Iterator[Row]:
    host = facts.host
    parts = [f"{host.cores_usable:g} usable of {host.cores}"]
    if host.cores_physical is not None:
        parts.append(f"{host.cores_physical} physical")
    if host.cores_allowed < host.cores:
        parts.append(f"affinity {host.cores_allowed}")
    if host.cores_limit is not None:
        parts.append(f"container's limit {host.cores_limit:g}")
    parts.append(f"{host.numa_nodes} NUMA node{'s' if host.numa_nodes > 1 else ''}")
    if host.processor is not None:
        parts.append(host.processor)
    yield Row("cores", ", ".join(parts))
    text = "unknown: /proc cannot be read"
    if host.memory_free_bytes is not None and host.memory_bytes is not None:
        text = f"{host.memory_free_bytes / GIB:.1f} of {host.memory_bytes / GIB:.1f} GiB free"
    if host.container_free_bytes is not None:
        text += f", {host.container_free_bytes / GIB:.1f} GiB of the container's limit"
    yield Row("memory", text)


def _limits(facts: Facts) -> Iterator[Row]:
    limits = facts.limits
    is_there = limits.segment_error is None
    segments = "available, as much as there is memory" if is_there else "not available"
    yield Row("shared memory", f"for worker processes: {segments}")
    yield Row("descriptors", _files(limits.files, limits.files_most))
    text = limits.temporary
    if limits.temporary_free_bytes is not None:
        text += f", {limits.temporary_free_bytes / GIB:.1f} GiB free"
    if limits.temporary_error is not None:
        text += f", {limits.temporary_error}"
    yield Row("temporary folder", text)


def _files(limit: int | None, most: int | None) -> str:
    if limit is None:
        return "any number of open files per process"
    text = f"{limit:,} open files per process"
    if most is not None and most <= limit:
        return text
    return f"{text}; ulimit -n raises it{'' if most is None else f' to at most {most:,}'}"


def _network(facts: Facts) -> Iterator[Row]:
    for interface in facts.interfaces:
        speed = "" if interface.mbit_per_s is None else f", {interface.mbit_per_s:,} Mbit/s"
        whom = " (this machine only)" if interface.is_loopback else ""
        yield Row("interfaces", f"{interface.name} {' '.join(interface.addresses)}{speed}{whom}")
