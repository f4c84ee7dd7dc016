"""Descriptors: the limit of open files of a process, and the number that a run needs.

A process out of descriptors receives messages without the descriptors sent with them. The limit is
therefore checked before anything is started, and the receiver of such a message raises.
"""

from __future__ import annotations

import array
import os
import select
import socket
from pathlib import Path

from quorate.errors import UserError

# Measured on Linux: a run with a run directory, a validation set and two workers has 13 open before
# the workers start, and at most 30, during a save.
PER_WORKER = 4  # socket, exit, captured output, start of a worker
SPARE = 14  # opened later: fork server, summaries, metrics, a checkpoint; and a reserve
PER_DEVICE = 4  # of a replica in stages, while processes start: the start of each, and a reserve
# Measured on Linux: four ranks of one machine have 59 open on rank 0 while training, and up to 5
# more while connecting.
PER_RANK = 11  # its process (see above), three connections of gloo, pipes, shared memory
SPARE_OF_RANKS = 20  # listening sockets of gloo, and the reserve above

# Close on exec: without the flag, child processes would inherit received descriptors.
_NOT_INHERITED = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))


def any_readable(*fds: int, timeout_s: float | None) -> bool:
    """Return whether any descriptor becomes readable in time. Blocks.

    Not by ``select.select``, which accepts no descriptor above 1023.

    Args:
        fds: the descriptors; a closed peer, or the end of a process, counts as readable.
        timeout_s: seconds to wait; None: no limit.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))


def receive_descriptors(
    end: socket.socket, nbytes: int, count: int, flags: int = 0
) -> tuple[bytes, list[int]]:
    """Receive bytes from a Unix socket, and the descriptors sent with the bytes.

    Not by ``socket.recv_fds``: in Python 3.11 the function ignores its flags and hides lost
    descriptors.

    Args:
        end: an end of a socket pair. Blocks depending on the socket's mode and ``flags``.
        nbytes: most bytes to receive.
        count: most descriptors in one message. The caller owns the returned descriptors.
        flags: flags of ``recvmsg``.

    Raises:
        UserError: the kernel could not deliver descriptors: this process has too many open files.
        OSError: as raised by ``recvmsg``.
    """
    fds = array.array("i")
    space = socket.CMSG_SPACE(count * fds.itemsize)
    data, extra, came, _ = end.recvmsg(nbytes, space, flags | _NOT_INHERITED)
    for level, kind, payload in extra:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) // fds.itemsize * fds.itemsize])
    if came & socket.MSG_CTRUNC:
        for fd in fds:  # an incomplete set of descriptors is useless
            os.close(fd)
        most, opened = limit()[0], _open()
        raise UserError(
            "descriptors",
            got="a message between processes without the descriptors sent with it, because process "
            f"{os.getpid()} has {'too many' if opened is None else opened} of "
            f"{'its' if most is None else most} open (ulimit -n)",
            fix="raise the limit, or close files that the script leaves open",
        )
    return data, list(fds)


def limit() -> tuple[int | None, int | None]:
    """Return the soft and the hard limit of open files of this process; None: no limit."""
    try:
        import resource
    except ImportError:  # a system without the module
        return None, None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    none = (resource.RLIM_INFINITY, -1)
    return None if soft in none else soft, None if hard in none else hard


def require_for_workers(workers: int) -> None:
    """Check that the free descriptors suffice for worker processes.

    Raises:
        UserError: there are too few; the error has the figures.
    """
    what = "1 worker needs" if workers == 1 else f"{workers} workers need"
    _require(PER_WORKER * workers + SPARE, what, "fewer workers, or engine='towers'")


def require_for_ranks(ranks: int) -> None:
    """Check that the free descriptors suffice for a rank of a collective.

    Raises:
        UserError: there are too few; the error has the figures.
    """
    what = "1 rank needs" if ranks == 1 else f"{ranks} ranks need"
    _require(PER_RANK * ranks + SPARE_OF_RANKS, what, "fewer workers, or engine='towers'")


def require_for_stages(devices: int) -> None:
    """Check that the free descriptors suffice for the processes of a replica in stages.

    Raises:
        UserError: there are too few; the error has the figures.
    """
    # Two descriptors for each pair of processes, including the replica's own process.
    need = devices * (devices + 1) + PER_DEVICE * devices + SPARE
    _require(need, f"stages on {devices} devices need", "fewer devices")


def _require(need: int, what: str, fewer: str) -> None:
    most, _ = limit()
    opened = _open()
    if most is not None and opened is not None and opened + need > most:
        raise UserError(
            "descriptors",
            f"{what} {need}, and {max(0, most - opened)} of {most} are left (ulimit -n)",
            fix=f"raise it: ulimit -n {max(256, opened + need)}, or use {fewer}",
        )


def _open() -> int | None:
    """Return the number of open descriptors of this process; None if unknown."""
    for folder in (Path("/proc/self/fd"), Path("/dev/fd")):
        try:
            return len(os.listdir(folder)) - 1  # noqa: PTH208  minus the listing's own descriptor
        except OSError:
            continue
    return None
