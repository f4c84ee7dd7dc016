"""Verdicts on the limits of a process: shared memory, descriptors, temporary folder. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quorate.commands.doctor.facts import Accelerator, Facts
from quorate.commands.doctor.verdict import BEWARE, FAILS, Verdict
from quorate.machine import descriptors

MIB = 1 << 20
FILES = 13 + descriptors.SPARE  # without the descriptors for workers
FILES_OF_SCRIPTS = 256  # descriptors that a script may open
TEMPORARY_LEAST_BYTES = 16 * MIB


def on_shared_memory(facts: Facts, chosen: Sequence[Accelerator]) -> Iterator[Verdict]:
    """Judge the shared memory of workers."""
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


def on_descriptors(facts: Facts, processes: int) -> Iterator[Verdict]:
    """Judge the limit of open files, for a number of worker processes."""
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
    if most is not None and most < max(FILES_OF_SCRIPTS, need):
        cure = (
            f"the most is {higher}: raise it in /etc/security/limits.conf, docker --ulimit nofile"
        )
    if limit < need:
        yield Verdict(FAILS, "descriptors", f"{may}, and {needs}", cure)
    elif limit < FILES_OF_SCRIPTS:
        yield Verdict(
            BEWARE,
            "descriptors",
            f"{may}: {needs}, and the script may open some itself",
            cure,
        )


def on_temporary_folder(facts: Facts) -> Iterator[Verdict]:
    """Judge the temporary folder: room, permission."""
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
