"""Descriptors: how many files a process may open, and how many a run needs.

Where they run out, a message between processes arrives without the descriptors it was sent with,
and nothing says why: so it is looked at before anything is started.
"""

from __future__ import annotations

import os
from pathlib import Path

from quorate.errors import UserError

# Measured on Linux: a run with a run directory, a validation set and two workers has 13 before it
# starts them, and 30 at most: while it saves.
PER_WORKER = 4  # its wire, its exit, what it printed, and how it was started
SPARE = 14  # what opens later: a fork server, summaries, metrics, a checkpoint; and some more

# Measured likewise: four ranks of one machine have 59 on rank 0 while they train, and up to 5 more
# while they connect.
PER_RANK = 11  # its process, see above, three connections by gloo, pipes, shared memory
SPARE_OF_RANKS = 20  # what gloo listens with, and the above


def limit() -> tuple[int | None, int | None]:
    """Return how many a process may open, and to what it may raise that itself; None: no limit."""
    try:
        import resource
    except ImportError:  # not on this system
        return None, None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    none = (resource.RLIM_INFINITY, -1)
    return None if soft in none else soft, None if hard in none else hard


def require_descriptors(workers: int, *, are_ranks: bool = False) -> None:
    """Compare what worker processes will need with what is left.

    Args:
        are_ranks: whether they are ranks of a collective, each of which is connected to all.

    Raises:
        UserError: there are too few; it names the figures.
    """
    most, _ = limit()
    opened = _open()
    what, need = "workers", PER_WORKER * workers + SPARE
    if are_ranks:
        what, need = "ranks", PER_RANK * workers + SPARE_OF_RANKS
    if most is not None and opened is not None and opened + need > most:
        raise UserError(
            f"descriptors: {workers} {what} need {need}, and {max(0, most - opened)} of {most} "
            f"are left (ulimit -n); raise it: ulimit -n {max(256, opened + need)}, or use fewer "
            "workers, or engine='towers'"
        )


def _open() -> int | None:
    """Return how many this process has open; None where that cannot be known."""
    for folder in (Path("/proc/self/fd"), Path("/dev/fd")):
        try:
            return len(os.listdir(folder)) - 1  # noqa: PTH208  without that of the listing
        except OSError:
            continue
    return None
