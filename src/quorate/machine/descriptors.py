"""Descriptors: how many files a process may open, and how many a run needs.

Where they run out, a message between processes arrives without the descriptors it was sent with: so
it is looked at before anything is started, and whoever receives such a message raises.
"""

from __future__ import annotations

import array
import os
import select
import socket
from pathlib import Path

from quorate.errors import UserError

# Measured on Linux: a run with a run directory, a validation set and two workers has 13 before it
# starts them, and 30 at most: while it saves.
PER_WORKER = 4  # its wire, its exit, what it printed, and how it was started
SPARE = 14  # what opens later: a fork server, summaries, metrics, a checkpoint; and some more
PER_DEVICE = 4  # of a replica in stages, while processes start: how each was started, and some more
# Measured likewise: four ranks of one machine have 59 on rank 0 while they train, and up to 5 more
# while they connect.
PER_RANK = 11  # its process, see above, three connections by gloo, pipes, shared memory
SPARE_OF_RANKS = 20  # what gloo listens with, and the above

# Else what this process starts would inherit descriptors that it receives.
_NOT_INHERITED = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))


def any_readable(*fds: int, timeout_s: float | None) -> bool:
    """Return whether a descriptor is readable in time. Blocks.

    ``select.select`` takes no descriptor above 1023.

    Args:
        fds: a closed far end, or the end of a process, counts as readable.
        timeout_s: None: wait for ever.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))


def receive_descriptors(
    end: socket.socket, nbytes: int, count: int, flags: int = 0
) -> tuple[bytes, list[int]]:
    """Receive bytes from a Unix socket, and the descriptors that came with them.

    ``socket.recv_fds`` of Python 3.11 ignores its flags, and says nothing of lost descriptors.

    Args:
        end: of a pair of sockets. It blocks, or not, as it is set and as ``flags`` say.
        nbytes: that are received at most.
        count: of descriptors that come with one message at most. The caller owns those returned.
        flags: of ``recvmsg``.

    Raises:
        UserError: the kernel could not hand descriptors over: this process has too many open.
        OSError: as ``recvmsg`` raises it.
    """
    fds = array.array("i")
    space = socket.CMSG_SPACE(count * fds.itemsize)
    data, extra, came, _ = end.recvmsg(nbytes, space, flags | _NOT_INHERITED)
    for level, kind, payload in extra:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) // fds.itemsize * fds.itemsize])
    if came & socket.MSG_CTRUNC:
        for fd in fds:  # some of a message are as good as none
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
    """Return how many a process may open, and to what it may raise that itself; None: no limit."""
    try:
        import resource
    except ImportError:  # not on this system
        return None, None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    none = (resource.RLIM_INFINITY, -1)
    return None if soft in none else soft, None if hard in none else hard


def require_for_workers(workers: int) -> None:
    """Compare what worker processes will need with what is left.

    Raises:
        UserError: there are too few; it names the figures.
    """
    what = "1 worker needs" if workers == 1 else f"{workers} workers need"
    _require(PER_WORKER * workers + SPARE, what, "fewer workers, or engine='towers'")


def require_for_ranks(ranks: int) -> None:
    """Compare what a rank of a collective will need with what is left.

    Raises:
        UserError: there are too few; it names the figures.
    """
    what = "1 rank needs" if ranks == 1 else f"{ranks} ranks need"
    _require(PER_RANK * ranks + SPARE_OF_RANKS, what, "fewer workers, or engine='towers'")


def require_for_stages(devices: int) -> None:
    """Compare what the processes of a replica in stages will need with what is left.

    Raises:
        UserError: there are too few; it names the figures.
    """
    # Two for each pair of processes, of which the replica's own is one.
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
    """Return how many this process has open; None where that cannot be known."""
    for folder in (Path("/proc/self/fd"), Path("/dev/fd")):
        try:
            return len(os.listdir(folder)) - 1  # noqa: PTH208  without that of the listing
        except OSError:
            continue
    return None
