"""Verdicts on what the system lets a process have: shared memory, descriptors, a folder. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quorate.commands.doctor.facts import Accelerator, Facts
from quorate.commands.doctor.verdict import BEWARE, FAILS, Verdict
from quorate.commands.doctor.wanted import Wanted
from quorate.machine import descriptors

MIB = 1 << 20
FILES = 11 + descriptors.SPARE  # without those for workers
# Loader processes hand over each tensor as a descriptor.
FILES_WITH_LOADERS = 256
# Batches of loader processes: below the first nothing goes, the second is a container's default.
SHM_LEAST_BYTES, SHM_SMALL_BYTES = 16 * MIB, 256 * MIB
TEMPORARY_LEAST_BYTES = 16 * MIB


def on_shared_memory(
    facts: Facts, wanted: Wanted, chosen: Sequence[Accelerator]
) -> Iterator[Verdict]:
    """Judge the shared memory of workers and of loader processes."""
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


def on_descriptors(facts: Facts, processes: int) -> Iterator[Verdict]:
    """Judge how many files a process may open, for so many worker processes."""
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


def on_temporary_folder(facts: Facts, wanted: Wanted) -> Iterator[Verdict]:
    """Judge the temporary folder: room, permission, the length of its path."""
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
