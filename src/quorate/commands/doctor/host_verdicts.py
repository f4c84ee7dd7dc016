"""Verdicts on cores, memory and network interfaces. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quorate.commands.doctor.facts import Accelerator, Facts
from quorate.commands.doctor.verdict import BEWARE, FAILS, Verdict
from quorate.commands.doctor.wanted import Wanted, cpu_workers
from quorate.machine.host import MIB


def on_cores(
    facts: Facts, wanted: Wanted, chosen: Sequence[Accelerator], workers: int
) -> Iterator[Verdict]:
    """Judge whether the cores suffice for the run's workers."""
    host = facts.host
    by_itself = f"CPU workers that a run starts by itself: {cpu_workers(facts)}; for more, "
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
    shortage = None if chosen else host.too_few_cores(workers, wanted.threads)
    if shortage is not None:
        yield Verdict(BEWARE, "cores", *shortage)


def on_memory(facts: Facts, chosen: Sequence[Accelerator], workers: int) -> Iterator[Verdict]:
    """Judge whether the memory suffices for the smallest model."""
    host, limits = facts.host, facts.limits
    if host.memory_free_bytes is None:
        yield Verdict(
            FAILS,
            "memory",
            "how much there is cannot be told: /proc is not there, and a run reads it",
            "mount -t proc proc /proc",
        )
    if (shortage := host.too_little_memory(0 if chosen else workers)) is not None:
        yield Verdict(FAILS, "memory", *shortage)
    if limits.address_bytes is not None and limits.address_bytes < 16 * 1024 * MIB:
        yield Verdict(
            BEWARE,
            "memory",
            f"addresses of a process are limited to {limits.address_bytes / MIB:,.0f} MiB "
            "(ulimit -v), which counts what is mapped and never touched",
            "ulimit -v unlimited",
        )


def on_interfaces(facts: Facts) -> Iterator[Verdict]:
    """Judge variables that name a network interface."""
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
